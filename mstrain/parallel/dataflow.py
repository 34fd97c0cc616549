"""Dataflows: which matrix of a projection stays in place, which two are communicated, and legal slice counts.

A projection: Y = X W with X (tokens, in), W (in, out), Y (tokens, out). The three GeMMs of a training step (forward,
input gradient, weight gradient) are one OS, one LS and one RS for every dataflow. The dataflow selects which two of X,
W and Y are communicated. A gradient is communicated like its matrix. MeshSlice paper sections 2.3, 3.1 and 3.2.1,
table 1.
"""

import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

# dataflow -> (matrix communicated between columns, matrix communicated between rows), as in the paper's table 1
MOVING = {"os": ("x", "w"), "ls": ("y", "w"), "rs": ("x", "y")}
# dataflow -> (the sliced dim, the dim sharded over rows only, the dim sharded over columns only)
DIMS = {"os": ("in", "tokens", "out"), "ls": ("out", "tokens", "in"), "rs": ("tokens", "in", "out")}


@dataclass(frozen=True)
class Projection:
    """A fully connected layer (in_dim -> out_dim).

    `experts` is its number of experts, 1 for a dense weight. Its input has `rows_in` and its output `rows_out` rows per
    token. Raises ValueError unless both dims are positive.
    """

    name: str
    in_dim: int
    out_dim: int
    experts: int = 1
    rows_in: int = 1
    rows_out: int = 1

    @property
    def rows(self) -> int:
        """Rows that are multiplied per token."""
        return max(self.rows_in, self.rows_out)

    def __post_init__(self):
        if min(self.in_dim, self.out_dim) < 1:
            raise ValueError(f"projection {self.name}: in_dim and out_dim must be 1 or more")


def check_dataflow(dataflow: str) -> str:
    """Returns `dataflow`; raises ValueError, with the known ones, for an unknown one."""
    if dataflow not in MOVING:
        raise ValueError(f"Unknown dataflow {dataflow!r}. Choose one of {', '.join(MOVING)}.")
    return dataflow


def orientations(dataflows: Iterable[str]) -> tuple[bool, ...]:
    """Whether the input of each projection of a block is transposed; the last entry is for the block's output.

    The block's input is (tokens, features). "rs" transposes its output, "os" and "ls" do not.
    """
    turns = (dataflow == "rs" for dataflow in dataflows)
    return tuple(itertools.accumulate(turns, operator.xor, initial=False))


def swapped(dataflow: str, transposed: bool) -> bool:
    """Whether rows and columns are exchanged relative to MOVING and DIMS, in which the input of "rs" is transposed."""
    return transposed != (dataflow == "rs")


def _dims(in_dim, out_dim, tokens, rows, cols, dataflow, transposed):
    sizes = {"in": in_dim, "out": out_dim, "tokens": tokens}
    sliced, over_rows, over_cols = DIMS[check_dataflow(dataflow)]
    if swapped(dataflow, transposed):
        over_rows, over_cols = over_cols, over_rows
    both = math.lcm(rows, cols)
    return sizes, ((sliced, both), (over_rows, rows), (over_cols, cols))


def mesh_fault(
    in_dim: int, out_dim: int, tokens: int, rows: int, cols: int, dataflow: str, transposed: bool = False
) -> str | None:
    """The reason why rows x cols cannot shard this projection; None if it can."""
    sizes, needs = _dims(in_dim, out_dim, tokens, rows, cols, dataflow, transposed)
    for dim, parts in needs:
        if sizes[dim] % parts:
            return f"{dim} {sizes[dim]} is not a multiple of {parts} ({dataflow} on {rows}x{cols})"
    return None


def legal_slices(
    in_dim: int, out_dim: int, tokens: int, rows: int, cols: int, dataflow: str, *,
    transposed: bool = False, max_slices: int = 32,
) -> tuple[int, ...]:  # fmt: skip
    """Legal slice counts S <= max_slices of MeshSlice, ascending; empty if the mesh cannot shard the projection.

    S * lcm(rows, cols) must divide the sliced dim (in for os, out for ls, tokens for rs), so that slice s has the same
    indices on both axes. MeshSlice paper section 3.1.2.
    """
    if mesh_fault(in_dim, out_dim, tokens, rows, cols, dataflow, transposed):
        return ()
    sizes, ((sliced, both), *_) = _dims(in_dim, out_dim, tokens, rows, cols, dataflow, transposed)
    width = sizes[sliced] // both
    return tuple(s for s in range(1, min(width, max_slices) + 1) if width % s == 0)


def check_slices(slices: int, legal: tuple[int, ...], what: str) -> int:
    """Returns `slices` if legal; otherwise raises ValueError with the nearest legal counts below and above."""
    if slices in legal:
        return slices
    below, above = [s for s in legal if s < slices], [s for s in legal if s > slices]
    near = below[-1:] + above[:1]
    raise ValueError(f"{what}: slice count {slices} is illegal. Use {' or '.join(map(str, near))}")
