"""Causal self-attention. Each device has whole sequences and whole heads, so the scores need no communication.

Keys and values of heads that several columns need are gathered among these columns (`mstrain.gemm.padding.Heads`).

Shapes: B sequences, T tokens per sequence, N query heads, K key-value heads, G = N / K query heads per key-value head,
H head_dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Heads, PlanPair, Span, Storage
from mstrain.gemm.local import all_gather_among, all_reduce, axis_index, constrain_layout
from mstrain.layers.attention_kernels import AttentionConfig, attend
from mstrain.layers.dense import Dense, Inits
from mstrain.layers.norm import normalize
from mstrain.layers.parameter import parameter
from mstrain.layers.rotary import Rotary


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
      width: features of the residual stream.
      heads: numbers and width of heads, and the columns that share them.
      config: how scores are computed (scale, soft cap, ALiBi).
      bias: whether (the projection in, the projection out) has a bias.
      inits: initializers of the two kernels.
      rotary: rotary position embedding; None for none.
      qk_norm: RMSNorm of queries and keys with a learned scale; None for none.
    """

    plans: PlanPair
    width: Span
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
        segments = self.heads.segments
        into = (self.plans.into, self.width, segments, self.inits.into, self.bias[0], "attention-in")
        out = (self.plans.out, segments[0], (self.width,), self.inits.out, self.bias[1], "attention-out")
        y_TxNH = self._attend(Dense(*into, name="qkv")(x_TxD), seq, window, segments_T)
        return Dense(*out, name="out")(y_TxNH)

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
        spans = self.heads.segments[:2] if norm.whole else (Span(self.heads.width),) * 2
        spec = sharded if norm.whole else P(None)
        scales = [
            parameter(self, f"{x}_scale", init, Storage((span.size,), (span,)), spec) for x, span in zip("qk", spans)
        ]
        return [scale + float(norm.unit_offset) for scale in scales], [spec, spec]

    def _local(self, seq, qkv, window, segments_T, *scales):
        heads, lowering = self.heads, self.plans.into.lowering
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = self._split(constrain_layout(qkv, lowering), seq, scales)
        segments_BxT = None if segments_T is None else segments_T.reshape(-1, seq)
        if self.rotary:
            positions = jnp.arange(seq) if segments_BxT is None else segment_positions(segments_BxT)
            q_BxTxNxH = self.rotary.rotate(q_BxTxNxH, window, positions)
            k_BxTxKxH = self.rotary.rotate(k_BxTxKxH, window, positions)
        devices = self.plans.grid.mesh.devices
        assert devices is not None, "an abstract mesh computes nothing"
        slopes_N, platform, order_N = None, devices.flat[0].platform, self._order()
        if self.config.alibi:
            slopes_N = alibi_slopes(heads.queries)[order_N]
        if heads.queries_here % heads.keys_here:  # the heads of this column cross the groups of key-value heads
            k_BxTxKxH, v_BxTxKxH = (x[:, :, order_N // (heads.queries // heads.keys)] for x in (k_BxTxKxH, v_BxTxKxH))
        y_BxTxNxH = attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, self.config, slopes_N, window, platform, segments_BxT)
        if heads.order.min() < 0:
            y_BxTxNxH = jnp.where(order_N[:, None] >= 0, y_BxTxNxH, 0)
        y = y_BxTxNxH.reshape(-1, heads.queries_here * heads.width)
        y = jnp.pad(y, ((0, 0), (0, heads.segments[0].stored // heads.columns - y.shape[1])))
        return constrain_layout(y, lowering)

    def _order(self):
        """The canonical numbers of this column's query heads; below 0 for padding."""
        count = self.heads.queries_here
        first = axis_index(self.plans.inside.features) * count
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(self.heads.order), first, count)

    def _split(self, qkv, seq, scales):
        """Queries, keys and values of this column's heads, [B, T, heads, H] each, the former two normalized."""
        heads, axes, norm = self.heads, self.plans.inside.features, self.qk_norm
        query, key = (span.stored // heads.columns for span in heads.segments[:2])
        q, k, v = jnp.split(qkv, [query, query + key], axis=-1)
        if norm and norm.whole:
            pairs = zip((q, k), scales, heads.segments, strict=False)
            q, k = (self._normalize_whole(x, scale, span.size) for x, scale, span in pairs)
        q = q[:, : heads.queries_here * heads.width]
        if heads.sharing > 1:
            kv = jnp.stack([k[:, : heads.key_features], v[:, : heads.key_features]], axis=1)
            k, v = jnp.moveaxis(all_gather_among(kv, axes, 2, heads.sharing), 1, 0)
        k, v = (x[:, : heads.keys_here * heads.width] for x in (k, v))
        q, k, v = (x.reshape(-1, seq, x.shape[-1] // heads.width, heads.width) for x in (q, k, v))
        if norm and not norm.whole:
            q, k = (self._normalize(x, scale) for x, scale in zip((q, k), scales, strict=True))
        return q, k, v

    def _normalize(self, x_BxTxNxH, scale_H):
        assert self.qk_norm
        y = normalize(x_BxTxNxH.astype(jnp.float32), "rmsnorm", self.qk_norm.epsilon) * scale_H
        return y.astype(x_BxTxNxH.dtype)

    def _normalize_whole(self, x_TxF, scale_F, features: int):
        """RMSNorm over the `features` of all columns; padding is zero."""
        assert self.qk_norm
        x = x_TxF.astype(jnp.float32)
        squares = all_reduce(jnp.sum(jnp.square(x), axis=1, keepdims=True), self.plans.inside.features)
        return (x * jax.lax.rsqrt(squares / features + self.qk_norm.epsilon) * scale_F).astype(x_TxF.dtype)


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
