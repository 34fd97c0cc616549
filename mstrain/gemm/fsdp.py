"""Fully sharded data parallelism (ZeRO stage 3; Rajbhandari et al., 2020) over the tensor-parallel devices.

The Y-stationary dataflow with every device in one column: tokens stay where they are, a weight is gathered before
use and its gradient scattered after.
"""

from jax.sharding import Mesh

from mstrain.gemm.collective import ls, os, rs
from mstrain.gemm.grid import Grid

__all__ = ["grid", "ls", "os", "rs"]


def grid(mesh: Mesh) -> Grid:
    return Grid(mesh, ("row", "col"), ())
