"""Attention between a chunk of queries and a chunk of keys, as one step of a ring needs it, forward and backward.

Shapes: q, y, dy [B, N, T, H], k, v [B, K, T, H], `total` [B, N, T], the logarithm of the sum of exponentials of the
scores of a query. `diagonal`: queries and keys are the same chunk; otherwise all keys are in the past.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mstrain.layers.attention_kernels import AttentionConfig, mask_scores


class Positions(NamedTuple):
    """What scores depend on beside queries and keys; the fields are those of `mask_scores`."""

    slopes_N: Any
    window: Any
    places: Any
    segments: Any


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Computed by plain XLA, with scores in memory."""

    config: AttentionConfig

    def forward(self, q, k, v, at: Positions, diagonal: bool):
        """(y in float32, total) of softmax(q . k) over these keys alone."""
        s = self._scores(q, k, at)
        total = jax.nn.logsumexp(s, axis=-1)
        p = jnp.exp(s - total[..., None]).astype(v.dtype)
        y = jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)
        return y.reshape(q.shape), total.reshape(q.shape[:3])

    def backward(self, q, y, total, dy, k, v, at: Positions, diagonal: bool):
        """Gradients (dq, dk, dv) in float32 of the block's part of softmax(q . k), whose result over all keys is y."""
        s, pullback = jax.vjp(lambda q, k: self._scores(q, k, at), q, k)
        total, dy_grouped = total.reshape(s.shape[:-1]), dy.reshape(*s.shape[:-1], -1)
        p = jnp.exp(s - total[..., None])
        dv = jnp.einsum("bkgts,bkgth->bksh", p.astype(dy.dtype), dy_grouped, preferred_element_type=jnp.float32)
        dp = jnp.einsum("bkgth,bksh->bkgts", dy_grouped, v, preferred_element_type=jnp.float32)
        mean = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).reshape(total.shape)
        dq, dk = pullback(p * (dp - mean[..., None]))
        return dq.astype(jnp.float32), dk.astype(jnp.float32), dv

    def _scores(self, q, k, at: Positions):
        B, N, T, H = q.shape
        q = q.reshape(B, k.shape[1], -1, T, H)
        s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * self.config.scale
        return mask_scores(s, self.config, *at)
