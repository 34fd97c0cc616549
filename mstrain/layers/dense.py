"""A projection: `y = x @ w + b`, computed by a plan, with its parameters in stored order."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mstrain.gemm import Layout, Plan, Span, Storage, linear
from mstrain.layers.parameter import parameter, unless_initializing, vector


@dataclasses.dataclass(frozen=True)
class Inits:
    """Initializers of the projection into one half of a block and of the projection out of it."""

    into: Callable
    out: Callable


class Kernel(NamedTuple):
    """A kernel in stored order, and what `mstrain.gemm.linear` takes as its `sink`."""

    value: Any
    sink: Any


def kernel_of(module: nn.Module, plan: Plan, storage: Storage, initializer: Callable) -> Kernel:
    """The parameter `kernel` of a module, for products of `plan`."""
    value = parameter(module, "kernel", initializer, storage, plan.grid.spec_of(storage.shape))
    return Kernel(value, module.get_variable("sinks", "kernel") if module.has_variable("sinks", "kernel") else None)


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
      apart: whether to return (y_TxO, bias_NxO) and leave the bias to `add_bias`.

    Returns y_TxO in the dtype of x; column shard j holds its part of every segment contiguously.
    """

    plan: Plan
    inputs: Span
    segments: tuple[Span, ...]
    initializer: Callable
    bias: bool = False
    saved: str = "product"
    apart: bool = False

    @nn.compact
    def __call__(self, x_TxI):
        grid, storage = self.plan.grid, self.plan.storage(self.inputs, self.segments)
        kernel = kernel_of(self, self.plan, storage, self.initializer)
        features = sum(span.stored for span in self.segments)
        y_TxO = unless_initializing(
            self, lambda: linear(x_TxI, kernel.value, self.plan, kernel.sink), (len(x_TxI), features), x_TxI.dtype
        )
        bias_NxO = None
        if self.bias:
            order = Storage(storage.shape[1:], segments=self.segments, columns=grid.num_cols)
            bias_NxO = vector(self, "bias", nn.initializers.zeros, order, self.plan.output_layout)
        if self.apart:
            return checkpoint_name(y_TxO, self.saved), bias_NxO
        return checkpoint_name(add_bias(y_TxO, bias_NxO), self.saved)


def add_bias(y_TxO, bias_NxO):
    """y with the bias of its N shards of tokens, or with none for None.

    In float32, so that its gradient is summed in float32: TPUs take five times as long for a sum of bfloat16.
    """
    if bias_NxO is None:
        return y_TxO
    rows = y_TxO.reshape(len(bias_NxO), -1, y_TxO.shape[1]) + bias_NxO[:, None]
    return rows.reshape(y_TxO.shape).astype(y_TxO.dtype)


def split_segments(y_TxO, widths: Sequence[int], platform: str) -> list[jax.Array]:
    """The segments, `widths` wide, of a fused projection on one column shard.

    The gradient of a split joins those of the segments: a copy. On a GPU it is a sum of padded ones, which XLA fuses
    with what made them.
    """
    ends = list(itertools.accumulate(widths))
    if platform != "gpu":
        return jnp.split(y_TxO, ends[:-1], axis=-1)
    return [y_TxO[..., end - width : end] for width, end in zip(widths, ends, strict=True)]


class DensePair(nn.Module):
    """Projects two x_TxI side by side, 2 I features, to the padded features `outputs`, without bias.

    Attributes:
      plan: plan of the product.
      layout: of both inputs; each shard of features puts its parts of both side by side, without communication.
      inputs: features of one of them.
      outputs: output features.
      initializer: initializer of the canonical [2 in, out] kernel.
    """

    plan: Plan
    layout: Layout
    inputs: Span
    outputs: Span
    initializer: Callable

    @nn.compact
    def __call__(self, one_TxI, other_TxI):
        grid, spec = self.plan.grid, self.layout.spec
        join = jax.shard_map(
            lambda *both: jnp.concatenate(both, axis=1),
            mesh=grid.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False,
        )  # fmt: skip
        both = Span(2 * self.inputs.size).padded(2, 2, self.inputs.stored)
        storage = dataclasses.replace(self.plan.storage(both, (self.outputs,)), halves=grid.size(self.layout.features))
        kernel = kernel_of(self, self.plan, storage, self.initializer)
        x = jax.lax.with_sharding_constraint(join(one_TxI, other_TxI), grid.sharding(self.plan.input_layout.spec))
        return linear(x, kernel.value, self.plan, kernel.sink)
