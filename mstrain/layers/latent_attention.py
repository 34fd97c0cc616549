"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads follow from a few features per token.

One product makes the latents of a token: those of queries (or the queries themselves), those of keys and values, and
the rotated part of its key, which all heads share. Normalized latents are then projected to heads, and attention is as
in `mstrain.layers.attention`. Kept for text that is continued: the latents of keys and values and the part to rotate,
instead of keys and values. Each step projects those that are kept again.

Shapes as in `mstrain.layers.attention`, with as many key-value heads as query heads; R features of latents.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Heads, Plan, PlanPair, Span
from mstrain.gemm.local import all_gather, axis_index, constrain_layout
from mstrain.layers.attention import places_of
from mstrain.layers.attention_kernels import AttentionConfig, attend
from mstrain.layers.context_attention import attend_parts
from mstrain.layers.dense import Dense, Inits
from mstrain.layers.norm import Norm, NormConfig
from mstrain.layers.past import KeysValues, Past, attend_past
from mstrain.layers.rotary import Rotary

EPSILON = 1e-6  # of the norms of latents, whatever that of the model


@dataclasses.dataclass(frozen=True)
class LatentPlans(PlanPair):
    """The plans of latent attention; `up` is that of the products from latents to heads."""

    up: Plan


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Features of latent attention with their padding.

    Attributes:
      heads: numbers of heads, of a query's and a key's features.
      query_rank: latent features of queries; None for queries without.
      key_rank: latent features of keys and values.
      rotary_dim: the last features of a query or key, which are rotated.
      value_dim: features of a value.
    """

    heads: Heads
    query_rank: int | None
    key_rank: int
    rotary_dim: int
    value_dim: int

    @property
    def queries(self) -> Span:
        return self.heads.segments[0]

    @property
    def keys_values(self) -> Span:
        """What keys have beside the rotated part, and values, head by head."""
        return self._of_heads(self.heads.width - self.rotary_dim + self.value_dim)

    @property
    def values(self) -> Span:
        return self._of_heads(self.value_dim)

    @property
    def into(self) -> tuple[Span, Span, Span]:
        """Of the first product: latents of queries or queries, latents of keys and values, the part to rotate."""
        queries = self._latent(self.query_rank) if self.query_rank else self.queries
        return queries, self._latent(self.key_rank), self._latent(self.rotary_dim)

    def _of_heads(self, width: int) -> Span:
        return dataclasses.replace(self.heads, width=width).segments[0]

    def _latent(self, size: int) -> Span:
        return Span(size).to_multiple(math.lcm(self.heads.unit, self.heads.columns))


class LatentAttention(nn.Module):
    """The attention half of a block, in the place of `mstrain.layers.attention.Attention`.

    Attributes:
      plans: plans of the products.
      width: features of the residual stream.
      sizes: heads and latents.
      config: how scores are computed.
      inits: initializers of the kernels, those out of latents as those into them.
      rotary: rotary position embedding of the rotated part.
    """

    plans: LatentPlans
    width: Span
    sizes: LatentSizes
    config: AttentionConfig
    inits: Inits
    rotary: Rotary

    @nn.compact
    def __call__(self, x_TxD, seq: int, window, segments_T=None, past: Past | None = None):
        """As `mstrain.layers.attention.Attention`, but KeysValues have latents [B, T, R, 1] and the part to rotate."""
        sizes = self.sizes
        into = (self.plans.into, self.width, sizes.into, self.inits.into, False, "attention-in")
        q, latents, rotated = self._parts(Dense(*into, name="latents")(x_TxD))
        if sizes.query_rank:
            q = self._project(sizes.into[0], sizes.queries, "queries")(self._norm(q, sizes.into[0], "queries_norm"))
        latents = self._norm(latents, sizes.into[1], "keys_norm")
        project = self._project(sizes.into[1], sizes.keys_values, "keys")
        kept = None if past is None or not past.kept.keys.shape[1] else past.kept
        earlier = kept and KeysValues(project(kept.keys.reshape(-1, kept.keys.shape[2])), kept.values)
        place = None if past is None else (past.slot, past.starts_B)
        segments_T = None if segments_T is None else self.plans.inside_order(segments_T)
        y_TxNH = self._attend(seq, q, project(latents), rotated, window, segments_T, earlier, place)
        out = (self.plans.out, sizes.values, (self.width,), self.inits.out, False, "attention-out")
        y_TxD = Dense(*out, name="out")(y_TxNH)
        return y_TxD if past is None else (y_TxD, KeysValues(*(self._kept(x, seq) for x in (latents, rotated))))

    def _project(self, rank: Span, features: Span, name: str) -> Dense:
        return Dense(self.plans.up, rank, (features,), self.inits.into, False, "attention-in", name=name)

    def _norm(self, x_TxR, rank: Span, name: str):
        mesh = self.plans.grid.mesh
        assert isinstance(mesh, Mesh), "an abstract mesh has no devices"
        config = NormConfig("rmsnorm", self.plans.inside, mesh, rank, EPSILON)
        return Norm(config, name=name)(x_TxR)

    def _parts(self, fused):
        """The segments of the first product, each sharded over the columns."""
        spec, columns = self.plans.inside.spec, self.plans.grid.num_cols
        first, second, _ = (span.stored // columns for span in self.sizes.into)
        split = functools.partial(jnp.split, indices_or_sections=[first, first + second], axis=1)
        return jax.shard_map(
            split, mesh=self.plans.grid.mesh, in_specs=spec, out_specs=[spec] * 3, check_vma=False
        )(fused)  # fmt: skip

    def _kept(self, x_TxR, seq: int):
        layout = self.plans.inside
        spec = P(layout.tokens or None, None, layout.features or None, None)
        x = x_TxR.reshape(-1, seq, x_TxR.shape[1], 1)
        return jax.lax.with_sharding_constraint(x, self.plans.grid.sharding(spec))

    def _attend(self, seq: int, q, keys_values, rotated, window, segments_T, earlier, place):
        spec, tokens = self.plans.inside.spec, P(self.plans.inside.tokens or None)
        kept = earlier and KeysValues(spec, P(*tokens, None, *spec[1:], None))
        local = jax.shard_map(
            functools.partial(self._local, seq), mesh=self.plans.grid.mesh, check_vma=False, out_specs=spec,
            in_specs=(spec, spec, spec, P(), tokens, kept, place and (P(), tokens)),
        )  # fmt: skip
        return local(q, keys_values, rotated, window, segments_T, earlier, place)

    def _local(self, seq, q, keys_values, rotated, window, segments_T, earlier, place):
        lowering, here = self.plans.into.lowering, seq // self.config.split.parts
        past = place and Past(KeysValues(None, None), *place)
        segments_BxS, positions = places_of(self.config.split, seq, segments_T, past)
        q_BxTxNxH = self._of_heads(constrain_layout(q, lowering), here, self.sizes.heads.width)
        plain, turned = jnp.split(q_BxTxNxH, [self.sizes.heads.width - self.sizes.rotary_dim], axis=-1)
        q_BxTxNxH = jnp.concatenate([plain, self.rotary.rotate(turned, window, positions)], axis=-1)
        k, v = self._keys_values(keys_values, rotated.reshape(-1, here, rotated.shape[1], 1), window, positions)
        if earlier:
            slots = earlier.values.shape[1]
            places = jnp.arange(slots) - past.starts_B[:, None]
            kept = self._keys_values(earlier.keys, earlier.values, window, places)
            y = attend_past(q_BxTxNxH, k, v, past._replace(kept=KeysValues(*kept)), self.config, None, window)
        else:
            compute = attend if self.config.split.parts == 1 else attend_parts
            y = compute(q_BxTxNxH, k, v, self.config, None, window, self.plans.grid.platform, segments_BxS)
        y = jnp.where(self._real()[:, None], y, 0).reshape(-1, y.shape[2] * y.shape[3])
        missing = self.sizes.values.stored // self.plans.grid.num_cols - y.shape[1]
        return constrain_layout(jnp.pad(y, ((0, 0), (0, missing))), lowering)

    def _keys_values(self, keys_values, rotated_BxSxRx1, window, positions):
        """(keys [B, S, N, H], values [B, S, N, value_dim]) of this column's heads."""
        sizes, seq = self.sizes, rotated_BxSxRx1.shape[1]
        plain_dim = sizes.heads.width - sizes.rotary_dim
        plain, v = jnp.split(self._of_heads(keys_values, seq, plain_dim + sizes.value_dim), [plain_dim], axis=-1)
        part = all_gather(rotated_BxSxRx1, self.plans.inside.features, 2)[:, :, : sizes.rotary_dim, 0]
        turned = self.rotary.rotate(part[:, :, None], window, positions)
        shared = jnp.broadcast_to(turned, (*plain.shape[:3], sizes.rotary_dim))
        return jnp.concatenate([plain, shared.astype(plain.dtype)], axis=-1), v

    def _of_heads(self, x_TxF, seq: int, width: int):
        """[B, T, N, width] without the padding of features."""
        count = self.sizes.heads.queries_here
        return x_TxF[:, : count * width].reshape(-1, seq, count, width)

    def _real(self):
        """Which heads of this column are in the model, and not padding."""
        count = self.sizes.heads.queries_here
        first = axis_index(self.plans.inside.features) * count
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(self.sizes.heads.order >= 0), first, count)
