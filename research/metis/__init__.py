"""The planners of Metis (SamsungLabs/Metis) reproduced: same counts, costs and best plans, including their defects."""

from research.metis.options import MetisOptions
from research.metis.result import MetisPlan, MetisResult, SearchStopped, reference_lines
from research.metis.search import run_metis

__all__ = ["MetisOptions", "MetisPlan", "MetisResult", "SearchStopped", "reference_lines", "run_metis"]
