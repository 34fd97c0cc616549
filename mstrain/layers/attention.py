"""Causal self-attention. Each device has whole sequences and whole heads, so the scores need no communication.

Shapes: B sequences, T tokens per sequence, N query heads, K key-value heads, G = N / K query heads per key-value head,
H head_dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from mstrain.gemm import PlanPair, Storage
from mstrain.gemm.local import axis_index, axis_size, constrain_layout
from mstrain.layers.attention_kernels import AttentionConfig, attend
from mstrain.layers.dense import Dense, Inits
from mstrain.layers.norm import normalize
from mstrain.layers.parameter import parameter


@dataclasses.dataclass(frozen=True)
class Heads:
    """Numbers and width of heads: N query heads, K key-value heads, each of H features."""

    queries: int
    keys: int
    width: int

    @property
    def segments(self) -> tuple[int, int, int]:
        """Widths of the fused projection: queries, keys, values."""
        return (self.queries * self.width, self.keys * self.width, self.keys * self.width)


class Attention(nn.Module):
    """The attention half of a block: project to queries, keys and values, attend, project back.

    Attributes:
      plans: plans of the two projections.
      heads: numbers and width of heads.
      config: how scores are computed (scale, soft cap, ALiBi).
      bias: whether (the projection in, the projection out) has a bias.
      inits: initializers of the two kernels.
      rotary_base: base of rotary position embedding; None for none.
      qk_norm_epsilon: epsilon of an RMSNorm of queries and keys per head with a learned scale (Qwen 3); None for none.
    """

    plans: PlanPair
    heads: Heads
    config: AttentionConfig
    bias: tuple[bool, bool]
    inits: Inits
    rotary_base: float | None = None
    qk_norm_epsilon: float | None = None

    @nn.compact
    def __call__(self, x_TxD, seq: int, window):
        """x_TxD holds sequences of `seq` tokens; a token attends to the last `window` tokens (traced int32)."""
        qkv = Dense(self.plans.into, self.heads.segments, self.inits.into, self.bias[0], name="qkv")(x_TxD)
        y_TxNH = self._attend(qkv, seq, window)
        return Dense(self.plans.out, x_TxD.shape[-1:], self.inits.out, self.bias[1], name="out")(y_TxNH)

    def _attend(self, qkv, seq, window):
        layout, scales = self.plans.inside, []
        if self.qk_norm_epsilon:
            storage = Storage((self.heads.width,))
            scales = [parameter(self, f"{x}_scale", nn.initializers.ones, storage, P(None)) for x in "qk"]
        local = jax.shard_map(
            functools.partial(self._local, seq),
            mesh=self.plans.grid.mesh,
            in_specs=(layout.spec, P(), *([P(None)] * len(scales))),
            out_specs=layout.spec,
            check_vma=False,
        )
        return local(qkv, window, *scales)

    def _local(self, seq, qkv, window, *scales):
        axes = self.plans.inside.features
        shards = axis_size(axes)
        queries, keys = self.heads.queries // shards, self.heads.keys // shards
        lowering = self.plans.into.lowering
        qkv = constrain_layout(qkv, lowering).reshape(-1, seq, queries + 2 * keys, self.heads.width)
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = jnp.split(qkv, [queries, queries + keys], axis=2)
        if scales:
            q_BxTxNxH = self._normalize(q_BxTxNxH, scales[0])
            k_BxTxKxH = self._normalize(k_BxTxKxH, scales[1])
        if self.rotary_base:
            q_BxTxNxH = rotate_positions(q_BxTxNxH, self.rotary_base)
            k_BxTxKxH = rotate_positions(k_BxTxKxH, self.rotary_base)
        devices = self.plans.grid.mesh.devices
        assert devices is not None, "an abstract mesh computes nothing"
        slopes_N, platform = None, devices.flat[0].platform
        if self.config.alibi:
            first = axis_index(axes) * queries
            slopes_N = jax.lax.dynamic_slice_in_dim(alibi_slopes(self.heads.queries), first, queries)
        y_BxTxNxH = attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, self.config, slopes_N, window, platform)
        return constrain_layout(y_BxTxNxH.reshape(-1, queries * self.heads.width), lowering)

    def _normalize(self, x, scale_H):
        assert self.qk_norm_epsilon is not None
        return (normalize(x.astype(jnp.float32), "rmsnorm", self.qk_norm_epsilon) * scale_H).astype(x.dtype)


def rotate_positions(x_BxTxNxH, base: float):
    """Rotary position embedding on halves of the head (Su et al., 2021; halves as in Llama)."""
    seq, width = x_BxTxNxH.shape[1], x_BxTxNxH.shape[3]
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    low, high = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BxTxNxH.dtype)


def alibi_slopes(heads: int):
    """Slopes of ALiBi (Press et al., 2022): powers of two, interpolated if `heads` is not a power of two."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return jnp.array(slopes + extra, jnp.float32)
