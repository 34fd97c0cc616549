"""Causal self-attention. Each device has whole heads, and whole sequences unless `AttentionConfig.split` splits them;
the scores of whole sequences need no communication.

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

from mstrain.gemm import Heads, Layout, PlanPair, Span, Storage
from mstrain.gemm.local import all_gather_among, all_reduce, axis_index, constrain_layout
from mstrain.layers.attention_kernels import AttentionConfig, attend, attend_by_splash, by_splash
from mstrain.layers.context_attention import attend_parts
from mstrain.layers.dense import Dense, Inits, split_segments
from mstrain.layers.norm import normalize
from mstrain.layers.parameter import vector, vector_spec
from mstrain.layers.past import KeysValues, Past, attend_past
from mstrain.layers.rotary import Rotary
from mstrain.layers.sequence_split import SequenceSplit


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
    def __call__(self, x_TxD, seq: int, window, segments_T=None, past: Past | None = None):
        """x_TxD holds sequences of `seq` tokens; a token attends to the last `window` tokens (traced int32), `GLOBAL`
        for all.

        With `segments_T`, it attends to tokens of its own segment only, and positions start at 0 in each segment. With
        `past`, it also attends to earlier tokens; the result is then (y, KeysValues of the new tokens).
        """
        segments = self.heads.segments
        into = (self.plans.into, self.width, segments, self.inits.into, self.bias[0], "attention-in")
        out = (self.plans.out, segments[0], (self.width,), self.inits.out, self.bias[1], "attention-out")
        y_TxNH, new = self._attend(Dense(*into, name="qkv")(x_TxD), seq, window, segments_T, past)
        y_TxD = Dense(*out, name="out")(y_TxNH)
        return y_TxD if past is None else (y_TxD, new)

    def _attend(self, qkv, seq, window, segments_T, past):
        layout = self.plans.inside
        (scales, specs), (sinks, of_sinks) = self._scales(), self._sinks()
        segments_T = None if segments_T is None else self.plans.inside_order(segments_T)
        kept = None if past is None else KeysValues(*[P(layout.tokens, None, layout.features or None)] * 2)
        local = jax.shard_map(
            functools.partial(self._local, seq),
            mesh=self.plans.grid.mesh,
            in_specs=(
                layout.spec,
                P(),
                P(layout.tokens),
                kept and Past(kept, P(), P(layout.tokens)),
                of_sinks,
                *specs,
            ),
            out_specs=(layout.spec, kept),
            check_vma=False,
        )
        if self.is_initializing():
            return jnp.zeros((len(qkv), self.heads.segments[0].stored), qkv.dtype), None
        return local(qkv, window, segments_T, past, sinks, *scales)

    def _sinks(self):
        """The sinks of all query heads, in the order of these, a `vector` with its spec; None without."""
        if not self.config.sinks:
            return None, None
        one_each = dataclasses.replace(self.heads, width=1, unit=1, key_unit=1)
        span, layout = one_each.segments[0], self.plans.inside
        sinks = vector(self, "sinks", self.inits.into, Storage((span.size,), (span,)), layout)
        return sinks, vector_spec(sinks, layout)

    def _scales(self):
        """Scales of the norms of queries and keys with their specs: none, one per feature of a head, or of all heads.

        Those of a head are applied by all devices, and those of all heads are sharded as these.
        """
        norm = self.qk_norm
        if norm is None:
            return [], []
        init = nn.initializers.zeros if norm.unit_offset else nn.initializers.ones
        spans = self.heads.segments[:2] if norm.whole else (Span(self.heads.width),) * 2
        inside = self.plans.inside
        layout = inside if norm.whole else Layout((*inside.tokens, *inside.features), ())
        scales = [
            vector(self, f"{x}_scale", init, Storage((span.size,), (span,)), layout) for x, span in zip("qk", spans)
        ]
        return [scale + float(norm.unit_offset) for scale in scales], [vector_spec(scales[0], layout)] * 2

    def _local(self, seq, qkv, window, segments_T, past, sinks_1xN, *scales):
        heads, lowering, split = self.heads, self.plans.into.lowering, self.config.split
        here = seq // split.parts
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = self._split(constrain_layout(qkv, lowering), here, scales)
        segments_BxS, positions = places_of(split, seq, segments_T, past)
        rotate, whole = None, past is None and split.parts == 1
        if self.rotary and whole and by_splash(self.plans.grid.platform, q_BxTxNxH, self.config):
            rotate = functools.partial(self.rotary.rotate_heads, window=window, positions=positions)
        elif self.rotary:
            q_BxTxNxH = self.rotary.rotate(q_BxTxNxH, window, positions)
            k_BxTxKxH = self.rotary.rotate(k_BxTxKxH, window, positions)
        sinks_N = None if sinks_1xN is None else sinks_1xN[0]
        y_BxTxNxH = self._mix(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, window, segments_BxS, past, sinks_N, rotate)
        y = y_BxTxNxH.reshape(-1, heads.queries_here * heads.width)
        y = jnp.pad(y, ((0, 0), (0, heads.segments[0].stored // heads.columns - y.shape[1])))
        return constrain_layout(y, lowering), None if past is None else KeysValues(k_BxTxKxH, v_BxTxKxH)

    def _mix(self, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, window, segments_BxS, past, sinks_N, rotate):
        """The values that each query head of this column attends to, [B, T, N, H]; zeros for padded heads."""
        heads, order_N = self.heads, self._order()
        slopes_N = alibi_slopes(heads.queries)[order_N] if self.config.alibi else None

        def of_queries(x_BxTxKxH):
            return x_BxTxKxH[:, :, order_N // (heads.queries // heads.keys)] if heads.crossing else x_BxTxKxH

        k_BxTxKxH, v_BxTxKxH = of_queries(k_BxTxKxH), of_queries(v_BxTxKxH)
        if past is not None and past.kept.keys.shape[1]:
            past = past._replace(kept=KeysValues(*map(of_queries, past.kept)))
            y_BxTxNxH = attend_past(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, past, self.config, slopes_N, window, sinks_N)
        elif rotate:
            y_BxTxNxH = attend_by_splash(
                q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, self.config, window, segments_BxS, sinks_N, rotate
            )
        else:
            platform, compute = self.plans.grid.platform, attend if self.config.split.parts == 1 else attend_parts
            y_BxTxNxH = compute(
                q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, self.config, slopes_N, window, platform, segments_BxS, sinks_N
            )
        return y_BxTxNxH if heads.order.min() >= 0 else jnp.where(order_N[:, None] >= 0, y_BxTxNxH, 0)

    def _order(self):
        """The canonical numbers of this column's query heads; below 0 for padding."""
        count = self.heads.queries_here
        first = axis_index(self.plans.inside.features) * count
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(self.heads.order), first, count)

    def _split(self, qkv, seq, scales):
        """Queries, keys and values of this column's heads, [B, T, heads, H] each, the former two normalized."""
        heads, axes, norm = self.heads, self.plans.inside.features, self.qk_norm
        widths = [span.stored // heads.columns for span in heads.segments]
        q, k, v = split_segments(qkv, widths, self.plans.grid.platform)
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

    def _normalize(self, x_BxTxNxH, scale_1xH):
        assert self.qk_norm
        y = normalize(x_BxTxNxH.astype(jnp.float32), "rmsnorm", self.qk_norm.epsilon) * scale_1xH
        return y.astype(x_BxTxNxH.dtype)

    def _normalize_whole(self, x_TxF, scale_1xF, features: int):
        """RMSNorm over the `features` of all columns; padding is zero."""
        assert self.qk_norm
        x = x_TxF.astype(jnp.float32)
        squares = all_reduce(jnp.sum(jnp.square(x), axis=1, keepdims=True), self.plans.inside.features)
        return (x * jax.lax.rsqrt(squares / features + self.qk_norm.epsilon) * scale_1xF).astype(x_TxF.dtype)


def places_of(split: SequenceSplit, seq: int, segments_T, past: Past | None):
    """(segments of whole sequences or None, positions of this device's tokens) for attention in `jax.shard_map`."""
    if past is not None:
        positions = past.positions(seq)
        return (positions >= 0).astype(jnp.int32), positions  # 0 before a sequence starts
    if segments_T is None:
        return None, split.places(seq)
    segments_BxS = split.gather(segments_T.reshape(-1, seq // split.parts), 1)
    return segments_BxS, split.own(segment_positions(segments_BxS), 1)


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
