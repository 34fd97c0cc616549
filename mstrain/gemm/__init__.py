"""The product: y = x @ w on a two-dimensional mesh. One file per algorithm, one interface, three dataflows."""

from mstrain.gemm.grid import Grid, Layout
from mstrain.gemm.linear import Flows, linear
from mstrain.gemm.lowering import LoweringOptions
from mstrain.gemm.plan import ALGORITHMS, DATAFLOWS, Plan, PlanPair, check_algorithm, grid_of, legal_slices
from mstrain.gemm.storage import Storage

__all__ = [
    "ALGORITHMS",
    "DATAFLOWS",
    "Flows",
    "LoweringOptions",
    "Grid",
    "Layout",
    "Plan",
    "PlanPair",
    "Storage",
    "check_algorithm",
    "grid_of",
    "legal_slices",
    "linear",
]
