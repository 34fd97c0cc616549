"""LayerNorm and RMSNorm with statistics in float32, in two passes to avoid cancellation with a large mean.

If features are sharded, each shard's mean and variance are all-gathered and combined as in Chan et al., 1979: one
all_gather of two numbers per token in the forward pass and one in the backward pass. The residuals of the backward pass
are x in its own dtype and two numbers per token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Layout, Storage
from mstrain.gemm.local import all_reduce, axis_size
from mstrain.layers.parameter import parameter


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Kind of a norm and layout of its x_TxD.

    Attributes:
      kind: `layernorm` or `rmsnorm`.
      layout, mesh: of x; the scale is sharded as the features of x.
      epsilon: added to the variance.
    """

    kind: str
    layout: Layout
    mesh: Mesh
    epsilon: float = 1e-5

    def on_mesh(self, function, in_specs, out_specs):
        # check_vma=False: results that are not sharded over an axis are summed over it explicitly.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


class Norm(nn.Module):
    """Normalizes the last dim of x_TxD, multiplies by a learned scale and, with `bias`, adds a learned bias.

    Attributes:
      config: kind, layout, epsilon.
      bias: whether to add a learned bias.
      unit_offset: whether the parameter is the scale minus one (Gemma).
    """

    config: NormConfig
    bias: bool = False
    unit_offset: bool = False

    @nn.compact
    def __call__(self, x_TxD):
        storage, spec = Storage(x_TxD.shape[-1:]), P(self.config.layout.features or None)
        init = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale_D = parameter(self, "scale", init, storage, spec) + float(self.unit_offset)
        bias_D = parameter(self, "bias", nn.initializers.zeros, storage, spec) if self.bias else None
        return _norm(x_TxD, scale_D, bias_D, self.config)


def normalize(x, kind: str, epsilon: float):
    """LayerNorm or RMSNorm without scale of the last dim of float32 x, which must not be sharded."""
    mean, variance = _moments(x, kind)
    return (x - mean) * lax.rsqrt(variance + epsilon)


def _scaled_norm(x, scale, bias, config) -> jax.Array:
    return _forward(x, scale, bias, config)[0]


_norm = jax.custom_vjp(_scaled_norm, nondiff_argnums=(3,))


def _forward(x, scale, bias, config):
    axes = config.layout.features

    def local(x, scale, bias):
        x_f32 = x.astype(jnp.float32)
        mean, variance = _moments(x_f32, config.kind)
        if axis_size(axes) > 1:
            means, variances = jnp.moveaxis(lax.all_gather(jnp.stack([mean, variance]), axes), 1, 0)
            mean = jnp.mean(means, axis=0)
            variance = jnp.mean(variances + jnp.square(means - mean), axis=0)
        rsqrt = lax.rsqrt(variance + config.epsilon)
        y = (x_f32 - mean) * rsqrt * scale
        return (y if bias is None else y + bias).astype(x.dtype), mean, rsqrt

    features, per_token = P(axes or None), P(config.layout.tokens or None)
    bias_spec = None if bias is None else features
    y, mean, rsqrt = config.on_mesh(
        local, (config.layout.spec, features, bias_spec), (config.layout.spec, per_token, per_token)
    )(x, scale, bias)
    return y, (x, scale, bias is None, mean, rsqrt)


def _backward(config, saved, dy):
    x, scale, biasless, mean, rsqrt = saved
    axes, tokens = config.layout.features, config.layout.tokens

    def local(x, scale, mean, rsqrt, dy):
        dy_f32 = dy.astype(jnp.float32)
        normal = (x.astype(jnp.float32) - mean) * rsqrt
        g = dy_f32 * scale
        means = jnp.stack([jnp.mean(g, axis=-1, keepdims=True), jnp.mean(g * normal, axis=-1, keepdims=True)])
        if axis_size(axes) > 1:
            means = jnp.mean(lax.all_gather(means, axes), axis=0)
        dx = g - normal * means[1]
        dx = (dx if config.kind == "rmsnorm" else dx - means[0]) * rsqrt
        sums = jnp.stack([jnp.sum(dy_f32 * normal, axis=0), jnp.sum(dy_f32, axis=0)])
        return dx.astype(x.dtype), all_reduce(sums, tokens)

    features, per_token = P(axes or None), P(tokens or None)
    dx, (dscale, dbias) = config.on_mesh(
        local,
        (config.layout.spec, features, per_token, per_token, config.layout.spec),
        (config.layout.spec, P(None, axes or None)),
    )(x, scale, mean, rsqrt, dy)
    return dx, dscale, None if biasless else dbias


_norm.defvjp(_forward, _backward)


def _moments(x, kind: str):
    """Mean over the last dim (zero for an RMSNorm) and mean squared deviation from it, with that dim kept."""
    mean = jnp.mean(x, axis=-1, keepdims=True) if kind == "layernorm" else jnp.zeros_like(x[..., :1])
    return mean, jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
