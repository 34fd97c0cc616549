"""A projection: `y = x @ w + b`, computed by a plan, with its parameters in stored order."""

import dataclasses
from collections.abc import Callable

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Plan, Span, Storage, linear
from mstrain.gemm.grouped import Groups, Rows
from mstrain.layers.parameter import parameter


@dataclasses.dataclass(frozen=True)
class Inits:
    """Initializers of the projection into one half of a block and of the projection out of it."""

    into: Callable
    out: Callable


class Dense(nn.Module):
    """Projects the padded features `inputs` of x_TxI to the padded features of `segments`.

    Its parameters are in the order of `Plan.storage`, and an ordinary weight may have the same shape: convert one with
    `Storage.from_canonical`. `mstrain.MeshDense` has ordinary weights.

    Attributes:
      plan: plan of the product.
      inputs: input features; weights of padding are zero and have zero gradients.
      segments: output features; several for a fused projection, each sharded over the columns of the grid.
      initializer: initializer of the canonical [in, out] kernel.
      bias: whether to add a bias.
      saved: name of the result for `remat=`.
      experts: number of experts, each with a kernel [in, out]; 0 for a dense projection.

    Returns y_TxO in the dtype of x; column shard j holds its part of every segment contiguously.
    """

    plan: Plan
    inputs: Span
    segments: tuple[Span, ...]
    initializer: Callable
    bias: bool = False
    saved: str = "product"
    experts: int = 0

    @nn.compact
    def __call__(self, x_TxI, groups: Groups | None = None, rows: Rows | None = None):
        """`groups` and `rows`, of experts, are those of `mstrain.gemm.linear`."""
        grid, storage = self.plan.grid, self.plan.storage(self.inputs, self.segments, self.experts)
        kernel = parameter(self, "kernel", self.initializer, storage, grid.spec_of(storage.shape))
        sink = self.get_variable("sinks", "kernel") if self.has_variable("sinks", "kernel") else None
        y_TxO = linear(x_TxI, kernel, self.plan, sink, groups, rows)
        if self.bias:
            order = Storage(storage.shape[1:], segments=self.segments, columns=grid.num_cols)
            spec = P(self.plan.output_layout.features or None)
            bias = parameter(self, "bias", nn.initializers.zeros, order, spec)
            y_TxO = y_TxO + bias.astype(y_TxO.dtype)
        return checkpoint_name(y_TxO, self.saved)
