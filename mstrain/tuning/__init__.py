"""Cost model and autotuner of MeshSlice. Pure Python: importing this does not import JAX."""

from mstrain.tuning.constants import AxisLinks, Constants, constants_for, load_constants
from mstrain.tuning.cost import Cost, Layout, layout_cost
from mstrain.tuning.dataflow import (
    Projection,
    check_slices,
    choose_dataflow,
    legal_slices,
    mesh_fault,
    orientations,
)
from mstrain.tuning.report import explain, plot, to_csv, to_json
from mstrain.tuning.result import Candidate, Choice, Tuning
from mstrain.tuning.search import factorisations, tune

__all__ = [
    "AxisLinks", "Candidate", "Choice", "Constants", "Cost", "Layout", "Projection", "Tuning", "check_slices",
    "choose_dataflow", "constants_for", "explain", "factorisations", "layout_cost", "legal_slices",
    "load_constants", "mesh_fault", "orientations", "plot", "to_csv", "to_json", "tune",
]
