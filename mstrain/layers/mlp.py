"""The MLP of a block: plain (up, activate, down) or gated (fused gate and up, activate, multiply, down)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from mstrain.gemm import PlanPair, Span
from mstrain.layers.dense import Dense, Inits, add_bias, split_segments
from mstrain.layers.parameter import unless_initializing, vector_spec

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}
WITHOUT_KERNEL = ("gelu",)  # Pallas has no erfc on TPUs
SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss


def clamped_swiglu(gate, up):
    """(up + 1) * gate * sigmoid(1.702 gate) with gate up to 7 and up from -7 to 7 (gpt-oss)."""
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_SLOPE * gate)


GATES = {"clamped_swiglu": clamped_swiglu}  # activations of two projections


@functools.cache
def gate_of(activation: str) -> Callable:
    """The function of (gate, up) of `activation`."""
    return GATES[activation] if activation in GATES else lambda gate, up: ACTIVATIONS[activation](gate) * up


class Mlp(nn.Module):
    """Maps x_TxD to activate(x U) D, or with `gated` to (activate(x G) * (x U)) D.

    Attributes:
      plans: plans of the two projections.
      width, hidden: features D of the residual stream and F of the MLP.
      activation: a key of `ACTIVATIONS` or, with `gated`, of `GATES`.
      gated: whether to multiply by a second projection; [gate, up] are the two segments of one product.
      bias: whether both projections have a bias.
      inits: initializers of the two kernels.
    """

    plans: PlanPair
    width: Span
    hidden: Span
    activation: str
    gated: bool
    bias: bool
    inits: Inits

    @nn.compact
    def __call__(self, x_TxD):
        segments = (self.hidden,) * (2 if self.gated else 1)
        into = (self.plans.into, self.width, segments, self.inits.into, self.bias, "mlp-in")
        out = (self.plans.out, self.hidden, (self.width,), self.inits.out, self.bias, "mlp-out")
        # The backward pass of a GPU adds the bias again: it keeps no sum.
        apart = not self.is_initializing() and self.plans.grid.platform == "gpu"
        up = Dense(*into, apart=apart, name="up")(x_TxD)
        h_TxF, bias_NxF = up if apart else (up, None)
        shape = len(x_TxD), self.hidden.stored
        g_TxF = unless_initializing(
            self, lambda: activate(h_TxF, self.plans, self.activation, self.gated, bias=bias_NxF), shape, x_TxD.dtype
        )
        return Dense(*out, name="down")(g_TxF)


def activate(h, plans: PlanPair, activation: str, gated: bool, scales=None, bias=None) -> jax.Array:
    """The activation between the products of `plans`; with `gated`, of [gate, up] on each feature shard of h.

    `scales`, one of each row of h, multiply the result; `bias`, a `vector`, is added to h first.
    """
    platform = plans.grid.platform
    by_kernel = platform == "tpu" and gated and activation not in WITHOUT_KERNEL and scales is not None

    def plain(h, scales, bias):
        h = add_bias(h, bias)
        if gated:
            h = gate_of(activation)(*split_segments(h, (h.shape[-1] // 2,) * 2, platform))
        else:
            h = ACTIVATIONS[activation](h)
        return h if scales is None else h * scales[:, None].astype(h.dtype)

    # Recomputing an activation costs less than saving its intermediate values. On a GPU layers are unrolled: without a
    # barrier, XLA would save them after all.
    plain = jax.checkpoint(plain, prevent_cse=platform == "gpu")

    def local(h, scales, bias) -> Any:
        if by_kernel:
            from mstrain.layers import gated_kernel  # here, because it imports Pallas

            if gated_kernel.fits(h):
                return gated_kernel.activate_scaled(h, scales, gate_of(activation))
        return plain(h, scales, bias)

    spec = plans.inside.spec
    specs = spec, None if scales is None else P(spec[0]), None if bias is None else vector_spec(bias, plans.inside)
    map_over = functools.partial(jax.shard_map, mesh=plans.grid.mesh, check_vma=False)
    return map_over(local, in_specs=specs, out_specs=spec)(h, scales, bias)
