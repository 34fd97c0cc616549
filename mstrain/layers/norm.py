"""LayerNorm and RMSNorm with statistics in float32, in two passes to avoid cancellation with a large mean.

If features are sharded, each shard's mean and variance are all-gathered and combined as in Chan et al., 1979: one
all_gather of two numbers per token in the forward pass and one in the backward pass. The residuals of the backward pass
are x in its own dtype and two numbers per token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Layout, Span, Storage
from mstrain.gemm.local import all_reduce, axis_index, axis_size
from mstrain.layers.parameter import unless_initializing, vector, vector_spec
from mstrain.mesh import platform_of


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Kind of a norm and layout of its x_TxD.

    Attributes:
      kind: `layernorm` or `rmsnorm`.
      layout, mesh: of x; the scale is sharded as the features of x.
      width: features of x; padding is zero and does not count.
      epsilon: added to the variance.
    """

    kind: str
    layout: Layout
    mesh: Mesh
    width: Span
    epsilon: float = 1e-5

    @property
    def on_gpu(self) -> bool:
        return platform_of(self.mesh) == "gpu"

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
        width, layout = self.config.width, self.config.layout
        storage = Storage((width.size,), (width,))
        init = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale_NxD = vector(self, "scale", init, storage, layout) + float(self.unit_offset)
        bias_NxD = vector(self, "bias", nn.initializers.zeros, storage, layout) if self.bias else None
        return unless_initializing(
            self, lambda: _norm(x_TxD, scale_NxD, bias_NxD, self.config), x_TxD.shape, x_TxD.dtype
        )  # fmt: skip


def normalize(x, kind: str, epsilon: float):
    """LayerNorm or RMSNorm without scale of the last dim of float32 x, which must not be sharded."""
    mean, variance = _moments(x, kind)
    return (x - mean) * lax.rsqrt(variance + epsilon)


def _scaled_norm(x, scale, bias, config) -> jax.Array:
    return _forward(x, scale, bias, config)[0]


_norm = jax.custom_vjp(_scaled_norm, nondiff_argnums=(3,))


def _forward(x, scale, bias, config):
    def local(x, scale, bias):
        x_f32, features = x.astype(jnp.float32), _Features(config)
        mean, variance = _moments(x_f32, config.kind, features.valid)
        if features.shards > 1:
            means, variances = jnp.moveaxis(lax.all_gather(jnp.stack([mean, variance]), features.axes), 1, 0)
            mean = features.mean(means)
            variance = features.mean(variances + jnp.square(means - mean))
        rsqrt = lax.rsqrt(variance + config.epsilon)
        y = features.mask((x_f32 - mean) * rsqrt) * scale
        return (y if bias is None else y + bias).astype(x.dtype), mean, rsqrt

    own, per_token = vector_spec(scale, config.layout), P(config.layout.tokens or None)
    bias_spec = None if bias is None else own
    y, mean, rsqrt = config.on_mesh(
        local, (config.layout.spec, own, bias_spec), (config.layout.spec, per_token, per_token)
    )(x, scale, bias)
    return y, (x, scale, bias is None, mean, rsqrt)


def _backward(config, saved, dy):
    x, scale, biasless, mean, rsqrt = saved
    if config.on_gpu:  # else computed again from x by kernels that then write normal * dy in float32 for its sum
        mean, rsqrt = lax.optimization_barrier((mean, rsqrt))
    axes, tokens = config.layout.features, config.layout.tokens

    def local(x, scale, mean, rsqrt, dy):
        dy_f32, features = dy.astype(jnp.float32), _Features(config)
        normal = features.mask((x.astype(jnp.float32) - mean) * rsqrt)
        g = dy_f32 * scale
        means = jnp.stack([_mean(g, features.valid), _mean(g * normal, features.valid)])
        if features.shards > 1:
            means = features.mean(lax.all_gather(means, axes))
        dx = g - normal * means[1]
        dx = features.mask((dx if config.kind == "rmsnorm" else dx - means[0]) * rsqrt)
        sums = jnp.stack([jnp.sum(dy_f32 * normal, axis=0, keepdims=True), jnp.sum(dy_f32, axis=0, keepdims=True)])
        return dx.astype(x.dtype), sums if own[0] else all_reduce(sums, tokens)

    own, per_token = vector_spec(scale, config.layout), P(tokens or None)
    dx, (dscale, dbias) = config.on_mesh(
        local,
        (config.layout.spec, own, per_token, per_token, config.layout.spec),
        (config.layout.spec, P(None, *own)),
    )(x, scale, mean, rsqrt, dy)
    return dx, dscale, None if biasless else dbias


_norm.defvjp(_forward, _backward)


class _Features:
    """The features of one shard, in `shard_map`: those that are not padding, and means over all shards."""

    def __init__(self, config: NormConfig):
        self.axes, width = config.layout.features, config.width
        self.shards = axis_size(self.axes)
        here = width.stored // self.shards
        self._counts = np.clip(width.size - here * np.arange(self.shards), 0, here)
        self._padded = width.stored > width.size
        self.valid = None
        if self._padded:
            self.valid = lax.iota(jnp.int32, here) < jnp.asarray(self._counts)[axis_index(self.axes)]

    def mask(self, x):
        return x if self.valid is None else jnp.where(self.valid, x, 0)

    def mean(self, means):
        """Over all features, from the mean of each shard on the first dim."""
        if not self._padded:
            return jnp.mean(means, axis=0)
        weights = jnp.asarray(self._counts / self._counts.sum(), jnp.float32)
        return jnp.sum(weights.reshape(-1, *[1] * (means.ndim - 1)) * means, axis=0)


def _moments(x, kind: str, valid=None):
    """Mean over the last dim (zero for an RMSNorm) and mean squared deviation from it, with that dim kept."""
    mean = _mean(x, valid) if kind == "layernorm" else jnp.zeros_like(x[..., :1])
    return mean, _mean(jnp.square(x - mean), valid)


def _mean(x, valid):
    """Mean over those elements of the last dim that are `valid` (all for None), 0 for none; that dim is kept."""
    if valid is None:
        return jnp.mean(x, axis=-1, keepdims=True)
    return jnp.sum(jnp.where(valid, x, 0), axis=-1, keepdims=True) / jnp.maximum(jnp.sum(valid), 1)
