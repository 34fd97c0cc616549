"""A `Plan` has the algorithm, dataflow, slice count and grid of one product, and checks that they are legal."""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.copies import COPIES
from mstrain.gemm.grid import Grid, Layout
from mstrain.gemm.lowering import LoweringOptions
from mstrain.gemm.padding import Span
from mstrain.gemm.precision import Precision
from mstrain.gemm.registry import ALGORITHMS, find_algorithm, same_program
from mstrain.gemm.scheduling import SchedulingGroups
from mstrain.gemm.storage import Storage


@dataclasses.dataclass(frozen=True)
class Plan:
    """How `y_TxO = x_TxI @ w` is computed.

    Attributes:
      algorithm: a key of `ALGORITHMS`.
      dataflow: `os` (Y-stationary), `ls` (X-stationary, weight stored [out, in]) or `rs` (W-stationary: tokens and
        features exchange their mesh axes between input and output).
      grid: the mesh axes of rows and columns.
      slices: slice count S; 1 for every algorithm but MeshSlice.
      lowering: options for the compiler of the target.
      precision: which operands have 8 bits.
      scheduling: the scheduling groups of its backward pass; None for none. Products in 8 bits ignore them.
    """

    algorithm: str
    dataflow: str
    grid: Grid
    slices: int = 1
    lowering: LoweringOptions = LoweringOptions()
    precision: Precision = Precision()
    scheduling: SchedulingGroups | None = None

    @property
    def kind(self) -> Algorithm:
        """The `Algorithm` called `algorithm`."""
        return ALGORITHMS[self.algorithm]

    @property
    def program(self) -> str:
        """The algorithm whose program the product is, and whose compiler options it takes."""
        return same_program(self.algorithm, self.dataflow, self.grid.num_cols, self.slices)

    @property
    def input_layout(self) -> Layout:
        return self.grid.swapped.layout if self.dataflow == "rs" else self.grid.layout

    @property
    def output_layout(self) -> Layout:
        return self.grid.layout

    def check(self, in_dim: int, out_dim: int, batch: int, what: str, prefix: str = "parallel.") -> None:
        """Raises ValueError, with the nearest legal choice, if this plan does not support these dims.

        Args:
          in_dim: input features.
          out_dim: output features.
          batch: sequences in one microbatch of one data-parallel replica.
          what: the projection's name, for the message.
          prefix: what precedes the names of keys in the message.
        """
        rows, cols = self.grid.num_rows, self.grid.num_cols
        self.kind.check_grid(rows, cols, what, prefix)
        self._check_divides(in_dim, out_dim, what)
        legal = legal_slices(self.dataflow, in_dim, out_dim, batch, rows, cols)
        if self.slices not in legal:
            near = sorted(sorted(legal, key=lambda s: abs(s - self.slices))[:3])
            raise ValueError(
                f"{what}: slice count {self.slices} is illegal on {rows}x{cols} for a {in_dim} x {out_dim} weight with "
                f"dataflow {self.dataflow} and {batch} sequences. Type {prefix}slices={_or(near)}."
            )

    def storage(self, inputs: Span, segments: tuple[Span, ...], experts: int = 0) -> Storage:
        """The storage order of a weight from `inputs` to `segments`, which are consecutive output features.

        With `experts`, of the weights of so many.
        """
        shape = inputs.size, sum(segment.size for segment in segments)
        return Storage(
            (experts, *shape) if experts else shape,
            segments=segments,
            columns=self.grid.num_cols,
            rows=self.grid.num_rows,
            slices=1 if self.dataflow == "rs" else self.slices,
            transposed=self.dataflow == "ls",
            first=inputs,
        )

    @property
    def units(self) -> tuple[int, int]:
        """What the input features and the output features must be a multiple of."""
        rows, cols = self.grid.num_rows, self.grid.num_cols
        both = math.lcm(rows, cols)
        return {"os": (both, cols), "ls": (cols, both), "rs": (rows, cols)}[self.dataflow]

    def _check_divides(self, in_dim, out_dim, what):
        rows, cols = self.grid.num_rows, self.grid.num_cols
        for name, dim, count in zip(("input", "output"), (in_dim, out_dim), self.units, strict=True):
            if dim % count:
                raise ValueError(
                    f"{what}: {dim} {name} features do not divide over the {rows}x{cols} grid of {self.algorithm} "
                    f"(they must be a multiple of {count}). Choose another mesh= or other model sizes."
                )


@dataclasses.dataclass(frozen=True)
class PlanPair:
    """The two projections of one half of a transformer block: into it, and out of it to the residual stream."""

    into: Plan
    out: Plan

    def __post_init__(self):
        # The output of rs has its sequences in slice-major order; an rs with as many slices restores their order.
        into, out = (p.slices if p.dataflow == "rs" else None for p in (self.into, self.out))
        assert into == out, f"{self.into} and {self.out} do not undo each other's token order"

    @property
    def residual(self) -> Layout:
        """The layout of the residual stream around this half."""
        return self.into.input_layout

    @property
    def inside(self) -> Layout:
        """The layout of heads or hidden features."""
        return self.into.output_layout

    @property
    def grid(self) -> Grid:
        return self.into.grid

    def inside_order(self, x_T):
        """Values of all tokens of the job, one each, in the order that the tokens have inside of this half.

        It differs from theirs outside only for `rs` in several slices: a row then has a part of every slice.
        """
        plan = self.into
        if plan.dataflow != "rs" or plan.slices == 1:
            return x_T
        copies, rows, cols = plan.grid.size(COPIES), plan.grid.num_rows, plan.grid.num_cols
        x = x_T.reshape(copies, cols, plan.slices, -1).swapaxes(1, 2)  # slice s has piece s of every column's tokens
        return x.reshape(copies, plan.slices, rows, -1).swapaxes(1, 2).reshape(x_T.shape)


def grid_of(algorithm: str, mesh: Mesh | AbstractMesh) -> Grid:
    """The grid that an algorithm uses on `mesh`."""
    return find_algorithm(algorithm).grid(mesh)


def legal_slices(dataflow: str, in_dim: int, out_dim: int, batch: int, rows: int, cols: int) -> list[int]:
    """Slice counts that divide the sliced dim on both grid directions (MeshSlice paper, section 3.1).

    The sliced dim is the one that the stationary matrix does not have: input features for `os`, output features for
    `ls`, tokens for `rs`. Tokens are split between sequences, because attention needs whole sequences.
    """
    sliced = {"os": in_dim, "ls": out_dim, "rs": batch}[dataflow]
    pieces, rest = divmod(sliced, math.lcm(rows, cols))
    return [1, *(s for s in range(2, min(pieces, 128) + 1) if not rest and pieces % s == 0)]


def _or(values):
    return " or ".join(map(str, values))
