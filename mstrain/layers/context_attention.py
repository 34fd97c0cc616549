"""Causal attention of sequences that several devices split (`mstrain.layers.sequence_split`).

Every device has the queries, keys and values of its part, and gets those of other parts all at once (`gather`) or one
part after the other (`ring`). A gather takes memory for the keys and values of the whole sequence while a layer
computes, which are small with grouped queries.

Shapes as in `mstrain.layers.attention`.
"""

import functools

import jax
import jax.numpy as jnp

from mstrain.layers.attention_blocks import Blocks
from mstrain.layers.attention_kernels import AttentionConfig, as_wide, flash_fits
from mstrain.layers.ring_attention import attend_in_steps


def attend_parts(q, k, v, config: AttentionConfig, slopes_N, window, platform: str, segments_BxS=None, sinks_N=None):
    """Attention of q_BxTxNxH, a part, over all parts of k, v_BxTxKxH; segments are those of whole sequences.

    Called in `jax.shard_map`; other arguments and the result as of `mstrain.layers.attention_kernels.attend`.
    """
    if v.shape[3] != q.shape[3]:
        same = functools.partial(
            attend_parts, config=config, slopes_N=slopes_N, window=window, platform=platform,
            segments_BxS=segments_BxS, sinks_N=sinks_N,
        )  # fmt: skip
        return as_wide(same, q, k, v)
    chunks = _chunks(q)
    blocks = Blocks(config)
    fits = flash_fits(q.dtype, chunks.shape[3], q.shape[3], config) and not config.windowed
    if platform == "tpu" and fits:
        from mstrain.layers.splash_blocks import SplashBlocks  # here, because it imports Pallas

        blocks = SplashBlocks(config)
    kv = jnp.stack([_chunks(k), _chunks(v)])
    y: jax.Array = attend_in_steps(chunks, kv, sinks_N, slopes_N, window, segments_BxS, blocks, config.split)
    return y.transpose(1, 0, 3, 2, 4).reshape(q.shape)


def _chunks(x_BxTxNxH):
    """The two chunks of a part, [2, B, N, T / 2, H]."""
    B, T, N, H = x_BxTxNxH.shape
    return x_BxTxNxH.reshape(B, 2, T // 2, N, H).transpose(1, 0, 3, 2, 4)
