"""LayerNorm and RMSNorm. Statistics in float32, in two passes, so that a large mean does not cancel.

Features may be sharded: the compiler turns the means into small all-reduces over the feature axes, one number per
token each. Nothing else of a norm communicates.
"""

import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Layout, Storage
from mstrain.layers.parameter import parameter


class Norm(nn.Module):
    """Normalises the last dim of x_TxD and scales it (and, for a LayerNorm with bias, shifts it).

    Attributes:
      kind: `layernorm` or `rmsnorm`.
      layout: where x lives; the scale is sharded as the features.
      bias: add a learned shift.
      epsilon: added to the variance.
      unit_offset: the learned scale is stored as its difference from one (Gemma).
    """

    kind: str
    layout: Layout
    bias: bool = False
    epsilon: float = 1e-5
    unit_offset: bool = False

    @nn.compact
    def __call__(self, x_TxD):
        storage, spec = Storage(x_TxD.shape[-1:]), P(self.layout.features or None)
        init = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale_D = parameter(self, "scale", init, storage, spec) + float(self.unit_offset)
        y_TxD = normalise(x_TxD.astype(jnp.float32), self.kind, self.epsilon) * scale_D
        if self.bias:
            y_TxD = y_TxD + parameter(self, "bias", nn.initializers.zeros, storage, spec)
        return y_TxD.astype(x_TxD.dtype)


def normalise(x, kind: str, epsilon: float):
    """Unscaled LayerNorm or RMSNorm of the last dim of float32 x."""
    if kind == "layernorm":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
