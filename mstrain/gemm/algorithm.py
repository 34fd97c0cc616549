"""What an algorithm is. Each file of an algorithm ends in one; `mstrain.gemm.registry` lists them."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from mstrain.gemm.grid import Grid

DATAFLOWS = ("os", "ls", "rs")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way of computing products on a mesh.

    Attributes:
      name: as users type it.
      os, ls, rs: the product of each dataflow on one device, `f(a, b, rows, cols, slices)`.
      product: `f(x_TxI, w_IxO, grid)` on whole arrays, differentiated by JAX, instead of the three.
      ls_transposed: Y^T of `ls`, where that is computed directly.
      dataflows: those of its plans; one alone where its grid leaves no choice.
      rows, cols: mesh axes that are the rows and the columns of its grid.
      sliced: it cuts collectives into slices: its plans have slice counts, and its flows take `lowering`.
      square: its grid must have as many rows as columns.
      costed: the planner's cost model describes it.
    """

    name: str
    os: Callable | None = None
    ls: Callable | None = None
    rs: Callable | None = None
    product: Callable | None = None
    ls_transposed: Callable | None = None
    dataflows: tuple[str, ...] = DATAFLOWS
    rows: tuple[str, ...] = ("row",)
    cols: tuple[str, ...] = ("col",)
    sliced: bool = False
    square: bool = False
    costed: bool = False

    @property
    def one_dimensional(self) -> bool:
        """Whether all tensor-parallel devices are in one row or in one column."""
        return not (self.rows and self.cols)

    @property
    def only_dataflow(self) -> str | None:
        """The dataflow of every plan; None where a plan chooses one."""
        return self.dataflows[0] if len(self.dataflows) == 1 else None

    def grid(self, mesh: Mesh) -> Grid:
        return Grid(mesh, self.rows, self.cols)

    def check_grid(self, rows: int, cols: int, what: str) -> None:
        """Raises ValueError when it cannot multiply on a grid of this shape."""
        if self.square and rows != cols:
            raise ValueError(
                f"{what}: {self.name} needs a square mesh and this one is {rows}x{cols}. "
                "Type mesh=2x2 or mesh=4x4, or parallel=collective."
            )
