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
from mstrain.gemm.local import all_reduce, axis_index, axis_size, constrain_layout
from mstrain.layers.attention_kernels import AttentionConfig, attend
from mstrain.layers.dense import Dense, Inits
from mstrain.layers.norm import normalize
from mstrain.layers.parameter import parameter
from mstrain.layers.rotary import Rotary


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


@dataclasses.dataclass(frozen=True)
class QkNorm:
    """RMSNorm of queries and keys.

    Attributes:
      epsilon: added to the mean square.
      whole: over the features of all heads (OLMo 2) instead of each head (Qwen 3).
      unit_offset: whether the parameter is the scale minus one (Gemma 3).
    """

    epsilon: float
    whole: bool = False
    unit_offset: bool = False


class Attention(nn.Module):
    """The attention half of a block: project to queries, keys and values, attend, project back.

    Attributes:
      plans: plans of the two projections.
      heads: numbers and width of heads.
      config: how scores are computed (scale, soft cap, ALiBi).
      bias: whether (the projection in, the projection out) has a bias.
      inits: initializers of the two kernels.
      rotary: rotary position embedding; None for none.
      qk_norm: RMSNorm of queries and keys with a learned scale; None for none.
    """

    plans: PlanPair
    heads: Heads
    config: AttentionConfig
    bias: tuple[bool, bool]
    inits: Inits
    rotary: Rotary | None = None
    qk_norm: QkNorm | None = None

    @nn.compact
    def __call__(self, x_TxD, seq: int, window, segments_T=None):
        """x_TxD holds sequences of `seq` tokens; a token attends to the last `window` tokens (traced int32), `GLOBAL`
        for all.

        With `segments_T`, it attends to tokens of its own segment only, and positions start at 0 in each segment.
        """
        qkv = Dense(self.plans.into, self.heads.segments, self.inits.into, self.bias[0], name="qkv")(x_TxD)
        y_TxNH = self._attend(qkv, seq, window, segments_T)
        return Dense(self.plans.out, x_TxD.shape[-1:], self.inits.out, self.bias[1], name="out")(y_TxNH)

    def _attend(self, qkv, seq, window, segments_T):
        layout = self.plans.inside
        scales, specs = self._scales(P(layout.features or None))
        local = jax.shard_map(
            functools.partial(self._local, seq),
            mesh=self.plans.grid.mesh,
            in_specs=(layout.spec, P(), P(layout.tokens), *specs),
            out_specs=layout.spec,
            check_vma=False,
        )
        return local(qkv, window, segments_T, *scales)

    def _scales(self, sharded: P):
        """Scales of the norms of queries and keys with their specs: none, one per feature of a head, or of all heads.

        Those of all heads have the spec `sharded`.
        """
        norm = self.qk_norm
        if norm is None:
            return [], []
        init = nn.initializers.zeros if norm.unit_offset else nn.initializers.ones
        widths = self.heads.segments[:2] if norm.whole else (self.heads.width,) * 2
        spec = sharded if norm.whole else P(None)
        scales = [parameter(self, f"{x}_scale", init, Storage((n,)), spec) for x, n in zip("qk", widths)]
        return [scale + float(norm.unit_offset) for scale in scales], [spec, spec]

    def _local(self, seq, qkv, window, segments_T, *scales):
        axes = self.plans.inside.features
        shards = axis_size(axes)
        queries, keys = self.heads.queries // shards, self.heads.keys // shards
        lowering = self.plans.into.lowering
        qkv = constrain_layout(qkv, lowering).reshape(-1, seq, queries + 2 * keys, self.heads.width)
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = jnp.split(qkv, [queries, queries + keys], axis=2)
        if scales:
            q_BxTxNxH = self._normalize(q_BxTxNxH, scales[0], axes)
            k_BxTxKxH = self._normalize(k_BxTxKxH, scales[1], axes)
        segments_BxT = None if segments_T is None else segments_T.reshape(-1, seq)
        if self.rotary:
            positions = jnp.arange(seq) if segments_BxT is None else segment_positions(segments_BxT)
            q_BxTxNxH = self.rotary.rotate(q_BxTxNxH, window, positions)
            k_BxTxKxH = self.rotary.rotate(k_BxTxKxH, window, positions)
        devices = self.plans.grid.mesh.devices
        assert devices is not None, "an abstract mesh computes nothing"
        slopes_N, platform = None, devices.flat[0].platform
        if self.config.alibi:
            first = axis_index(axes) * queries
            slopes_N = jax.lax.dynamic_slice_in_dim(alibi_slopes(self.heads.queries), first, queries)
        y_BxTxNxH = attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, self.config, slopes_N, window, platform, segments_BxT)
        return constrain_layout(y_BxTxNxH.reshape(-1, queries * self.heads.width), lowering)

    def _normalize(self, x_BxTxNxH, scale, axes):
        norm, x = self.qk_norm, x_BxTxNxH.astype(jnp.float32)
        assert norm is not None
        if norm.whole:
            # The mean of the shards' means is that of all heads, because the shards are equal.
            square = all_reduce(jnp.mean(jnp.square(x), axis=(2, 3), keepdims=True), axes) / axis_size(axes)
            x = x * jax.lax.rsqrt(square + norm.epsilon) * scale.reshape(x.shape[2:])
        else:
            x = normalize(x, "rmsnorm", norm.epsilon) * scale
        return x.astype(x_BxTxNxH.dtype)


def segment_positions(segments_BxT):
    """Position of each token in its run of equal segments, int32 [B, T]."""
    places = jnp.arange(segments_BxT.shape[1], dtype=jnp.int32)
    starts = segments_BxT != jnp.roll(segments_BxT, 1, axis=1)
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)


def alibi_slopes(heads: int):
    """Slopes of ALiBi (Press et al., 2022): powers of two, interpolated if `heads` is not a power of two."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return jnp.array(slopes + extra, jnp.float32)
