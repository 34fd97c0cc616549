"""Keys and values that attention has computed before (KV cache), for text that is continued token by token.

All sequences have as many slots, and a new token is in the same slot of each. A shorter sequence starts in a later
slot; its tokens have positions from 0 on.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from mstrain.layers.attention_kernels import AttentionConfig, mask_scores, softmax


class KeysValues(NamedTuple):
    """Keys and values of the tokens in S slots, as attention uses them: after norms and rotary positions.

    Attributes:
      keys, values: [B, S, K, H], with a dim of layers in front where they are stacked; sharded over the mesh axes of
        tokens (B) and of heads (K). Columns that share key-value heads have a copy each. Latent attention keeps
        [B, S, features, 1] (`mstrain.layers.latent_attention`).
    """

    keys: Any
    values: Any


class Past(NamedTuple):
    """Where new tokens are, and what they attend to.

    Attributes:
      kept: of the slots before; those at `slot` and after are not read. No slots for the first tokens of a sequence.
      slot: int32 [], the slot of the first new token.
      starts_B: int32 [B], the first slot of each sequence.
    """

    kept: KeysValues
    slot: Any
    starts_B: Any

    def positions(self, seq: int):
        """Position of each of `seq` new tokens, int32 [B, seq]; below 0 before the start of a sequence."""
        return self.slot + jnp.arange(seq, dtype=jnp.int32) - self.starts_B[:, None]

    def for_layers(self, count: int) -> "Past":
        """With a dim of `count` layers in front of `slot` and `starts_B`, as `kept` has it."""
        stacked = (jnp.broadcast_to(x, (count, *jnp.shape(x))) for x in (self.slot, self.starts_B))
        return Past(self.kept, *stacked)


def attend_past(q, k, v, past: Past, config: AttentionConfig, slopes_N, window, sinks_N=None):
    """Causal attention of new tokens, q_BxTxNxH with k, v_BxTxKxH, over those of `past` and over themselves.

    A token attends to the last `window` tokens of its sequence. Returns [B, T, N, H] in the dtype of q.
    """
    (B, T, N, H), K, S = q.shape, k.shape[2], past.kept.keys.shape[1]
    config = dataclasses.replace(config, windowed=True)  # without windows, `window` is GLOBAL
    grouped, slots, before = q.reshape(B, T, K, N // K, H), past.slot + jnp.arange(T), jnp.arange(S)
    filled_BxS = (before >= past.starts_B[:, None]) & (before < past.slot)

    def scores(keys, places, segments):
        s_BxKxGxTxS = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, preferred_element_type=jnp.float32) * config.scale
        return mask_scores(s_BxKxGxTxS, config, slopes_N, window, (slots, places), segments)

    earlier = scores(past.kept.keys, before, (jnp.ones((B, T), bool), filled_BxS))
    every = jnp.concatenate([earlier, scores(k, slots, None)], axis=-1)
    p_BxKxGxTxS = softmax(every, sinks_N).astype(v.dtype)
    y_earlier, y_new = (
        jnp.einsum("bkgts,bskh->btkgh", p, values, preferred_element_type=jnp.float32)
        for p, values in zip(jnp.split(p_BxKxGxTxS, [S], axis=-1), (past.kept.values, v), strict=True)
    )
    return (y_earlier + y_new).reshape(B, T, N, -1).astype(q.dtype)
