"""Metis, compatible with the reference: counts, costs and best plans, defects included."""

from mstrain.planning.metis.options import MetisOptions
from mstrain.planning.metis.result import MetisPlan, MetisResult, SearchStopped, reference_lines, write_json
from mstrain.planning.metis.search import run_metis

__all__ = ["MetisOptions", "MetisPlan", "MetisResult", "SearchStopped", "reference_lines", "run_metis",
           "write_json"]
