"""Distributed matrix products `y = x @ w`: one file per algorithm, one interface, three dataflows."""

from mstrain.gemm.algorithm import DATAFLOWS, Algorithm
from mstrain.gemm.grid import Grid, Layout
from mstrain.gemm.linear import Flows, linear
from mstrain.gemm.lowering import LoweringOptions
from mstrain.gemm.padding import Heads, Span
from mstrain.gemm.plan import Plan, PlanPair, grid_of, legal_slices
from mstrain.gemm.registry import ALGORITHMS, MESHSLICE, any_sliced, find_algorithm, same_program
from mstrain.gemm.storage import Storage

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DATAFLOWS",
    "Flows",
    "LoweringOptions",
    "MESHSLICE",
    "Grid",
    "Heads",
    "Layout",
    "Plan",
    "PlanPair",
    "Span",
    "Storage",
    "any_sliced",
    "find_algorithm",
    "grid_of",
    "legal_slices",
    "linear",
    "same_program",
]
