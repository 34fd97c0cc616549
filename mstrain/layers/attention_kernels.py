"""Attention kernels: splash attention on TPUs, cuDNN on GPUs, and plain XLA where neither supports the inputs.

Shapes as in `mstrain.layers.attention`. The kernel is chosen when the step is traced, for the platform it is compiled
for.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mstrain.layers.sequence_split import SequenceSplit

SAVED = "attention"  # name of the result for `remat=`
MASKED = -1e30  # a score that the softmax ignores
CUDNN_WIDEST_HEAD = 128  # of its backward pass, on all GPU generations


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How scores are computed from q . k.

    Attributes:
      scale: factor on q . k.
      alibi: whether to add slope * (key position - query position).
      soft_cap: c of c * tanh(score / c) (Gemma 2); None for none.
      windowed: whether some layers attend to a window of past tokens only. The window is then a traced operand.
      local: tokens of that window, which splash attention needs when it is traced; None where it is not known.
      split: of sequences over devices.
      sinks: whether every query head has a learned score of no key, a sink, in its softmax (gpt-oss).
    """

    scale: float
    alibi: bool = False
    soft_cap: float | None = None
    windowed: bool = False
    local: int | None = None
    split: SequenceSplit = SequenceSplit()
    sinks: bool = False


def attend(q, k, v, config: AttentionConfig, slopes_N, window, platform: str = "cpu", segments_BxT=None, sinks_N=None):
    """Causal attention of q_BxTxNxH over k, v_BxTxKxH; returns [B, T, N, H] in the dtype of q. H of v may be smaller.

    `platform` is JAX's name of the platform that the program is compiled for. Tokens attend to equal `segments_BxT`
    only; cuDNN has no such mask, so plain XLA computes it on GPUs.
    """
    if by_splash(platform, q, config):
        return attend_by_splash(q, k, v, config, window, segments_BxT, sinks_N)
    if platform in ("gpu", "cuda") and flash_fits(q.dtype, q.shape[1], q.shape[3], config):
        extras = config.soft_cap or config.windowed or config.sinks or segments_BxT is not None
        wide = q.shape[3] > CUDNN_WIDEST_HEAD or v.shape[3] != q.shape[3]
        if not wide and not extras:
            return checkpoint_name(_attend_cudnn(q, k, v, config=config), SAVED)
    return checkpoint_name(_attend_xla(q, k, v, config, slopes_N, window, segments_BxT, sinks_N), SAVED)


def by_splash(platform: str, q_BxTxNxH, config: AttentionConfig) -> bool:
    """Whether splash attention computes `attend`."""
    return platform == "tpu" and flash_fits(q_BxTxNxH.dtype, q_BxTxNxH.shape[1], q_BxTxNxH.shape[3], config)


def attend_by_splash(q, k, v, config: AttentionConfig, window, segments_BxT=None, sinks_N=None, rotate=None):
    """`attend` where `by_splash`; `rotate`, if any, is applied to q and k as [B, N, T, H]."""
    same = {"window": window, "segments_BxT": segments_BxT, "sinks_N": sinks_N, "rotate": rotate}
    return as_wide(functools.partial(_attend_splash, config=config, **same), q, k, v)


def flash_fits(dtype, tokens: int, head_dim: int, config: AttentionConfig) -> bool:
    """Flash kernels need bfloat16, whole blocks of tokens, and scores without a bias; cuDNN's also without a window, a
    sink and a soft cap."""
    extras = config.alibi or (config.windowed and config.local is None)
    return not extras and dtype == jnp.bfloat16 and head_dim % 8 == 0 and tokens % 128 == 0


def _attend_xla(q, k, v, config: AttentionConfig, slopes_N, window, segments_BxT, sinks_N):
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    s_BxKxGxTxS = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * config.scale
    places, segments = (x if x is None else (x, x) for x in (jnp.arange(T), segments_BxT))
    s_BxKxGxTxS = mask_scores(s_BxKxGxTxS, config, slopes_N, window, places, segments)
    p_BxKxGxTxS = softmax(s_BxKxGxTxS, sinks_N).astype(v.dtype)
    y = jnp.einsum("bkgts,bskh->btkgh", p_BxKxGxTxS, v, preferred_element_type=jnp.float32)
    return y.reshape(B, T, N, -1).astype(q.dtype)


def as_wide(attention: Callable, q, k, v):
    """`attention(q, k, v)` with the features of v padded to as many as q has."""
    missing = q.shape[3] - v.shape[3]
    y = attention(q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else v)
    return y[..., : v.shape[3]]


def softmax(s_BxKxGxTxS, sinks_N=None):
    """Probabilities of the keys, float32; a sink takes the rest of them."""
    if sinks_N is None:
        return jax.nn.softmax(s_BxKxGxTxS, axis=-1)
    sinks = sinks_N.astype(jnp.float32).reshape(1, *s_BxKxGxTxS.shape[1:3], 1)
    total = jnp.logaddexp(jax.nn.logsumexp(s_BxKxGxTxS, axis=-1), sinks)
    return jnp.exp(s_BxKxGxTxS - total[..., None])


def mask_scores(s_BxKxGxTxS, config: AttentionConfig, slopes_N, window, places, segments):
    """Scores with soft cap, ALiBi and mask, from q . k times the scale, float32.

    `places` are those of queries [T] and of keys [S] in their sequence, `segments` theirs [B, T] and [B, S], or None.
    """
    K, G = s_BxKxGxTxS.shape[1:3]
    if config.soft_cap:
        s_BxKxGxTxS = config.soft_cap * jnp.tanh(s_BxKxGxTxS / config.soft_cap)
    past_TxS = places[0][:, None] - places[1][None, :]
    if config.alibi:
        s_BxKxGxTxS = s_BxKxGxTxS - slopes_N.reshape(K, G, 1, 1) * past_TxS
    seen_TxS = past_TxS >= 0
    if config.windowed:
        seen_TxS &= past_TxS < window
    if segments is not None:
        seen_TxS &= (segments[0][:, :, None] == segments[1][:, None, :])[:, None, None]
    return jnp.where(seen_TxS, s_BxKxGxTxS, MASKED)


def _attend_cudnn(q, k, v, *, config: AttentionConfig):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=config.scale, implementation="cudnn")


def _attend_splash(q, k, v, *, config: AttentionConfig, window, segments_BxT=None, sinks_N=None, rotate=None):
    from mstrain.layers.splash import attend_by, heads_first, splash, splash_kernel, tokens_first  # it imports Pallas

    def kernel(local):
        one = splash_kernel(
            *q.shape[1:], causal=True, local=local, attn_logits_soft_cap=config.soft_cap,
            residual_checkpoint_name=SAVED,  # with the sums of its softmax: else the backward pass runs it again
        )  # fmt: skip
        return functools.partial(attend_by, one)

    segments = None if segments_BxT is None else splash.SegmentIds(segments_BxT, segments_BxT)
    sinks_N = None if sinks_N is None else sinks_N.astype(q.dtype)  # as its gradient
    by_head = list(map(heads_first, (q * config.scale, k, v)))
    if rotate is not None:
        by_head[:2] = map(rotate, by_head[:2])
    operands = *by_head, segments, sinks_N
    if config.windowed:
        y = jax.lax.cond(window > config.local, kernel(None), kernel(config.local), *operands)
    else:
        y = kernel(None)(*operands)
    assert isinstance(y, jax.Array), "the kernel returns a tuple only with save_residuals"
    return tokens_first(y)
