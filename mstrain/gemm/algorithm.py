"""The interface of an algorithm. Every algorithm file defines one `ALGORITHM`; `mstrain.gemm.registry` lists them."""

import dataclasses
from collections.abc import Callable

from jax.sharding import AbstractMesh, Mesh

from mstrain.gemm.grid import Grid

DATAFLOWS = ("os", "ls", "rs")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A way to compute products on a mesh.

    Attributes:
      name: the value of `parallel=`.
      os, ls, rs: the product of each dataflow on one device, `f(a, b, rows, cols, slices)`; called in `jax.shard_map`.
      product: `f(x_TxI, w_IxO, grid)` on global arrays, differentiated by JAX; replaces `os`, `ls` and `rs`.
      ls_transposed: computes Y^T of `ls` directly; None transposes the result of `ls`.
      scheduled: (dx, dw) of a product with `Plan.scheduling`, `f(dataflow, groups, x, w, dy, rows, cols, slices)`; None
        if it has no scheduling groups.
      dataflows: the dataflows that its plans may have.
      rows, cols: mesh axes that form the rows and the columns of its grid.
      sliced: whether it splits collectives into slices; its plans then have slice counts, its flows take `lowering`.
      square: whether its grid must have as many rows as columns.
      costed: whether the planner's cost model supports it.
      grouped: the dataflows that its products of experts may have.
    """

    name: str
    os: Callable | None = None
    ls: Callable | None = None
    rs: Callable | None = None
    product: Callable | None = None
    ls_transposed: Callable | None = None
    scheduled: Callable | None = None
    dataflows: tuple[str, ...] = DATAFLOWS
    rows: tuple[str, ...] = ("row",)
    cols: tuple[str, ...] = ("col",)
    sliced: bool = False
    square: bool = False
    costed: bool = False
    grouped: tuple[str, ...] = ("os", "ls")

    @property
    def one_dimensional(self) -> bool:
        """Whether all tensor-parallel devices are in one row or in one column."""
        return not (self.rows and self.cols)

    @property
    def only_dataflow(self) -> str | None:
        """The dataflow of every plan; None if a plan can choose between several."""
        return self.dataflows[0] if len(self.dataflows) == 1 else None

    def grid(self, mesh: Mesh | AbstractMesh) -> Grid:
        """The grid on `mesh`; axes that the mesh does not have are of size 1."""
        rows, cols = (tuple(axis for axis in axes if axis in mesh.shape) for axes in (self.rows, self.cols))
        return Grid(mesh, rows, cols)

    def check_grid(self, rows: int, cols: int, what: str, prefix: str) -> None:
        """Raises ValueError, with `what` and keys after `prefix`, if the algorithm does not support such a grid."""
        if self.square and rows != cols:
            raise ValueError(
                f"{what}: {self.name} needs a square mesh and this one is {rows}x{cols}. "
                f"Type mesh=2x2 or mesh=4x4, or {prefix}algorithm=collective."
            )
