"""Attention kernels: splash attention on TPUs, cuDNN on GPUs, and plain XLA where neither supports the inputs.

Shapes as in `mstrain.layers.attention`. The kernel is chosen when the step is traced, for the platform it is compiled
for.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SAVED = "attention"  # name of the result for `remat=`
CUDNN_WIDEST_HEAD = 128  # of its backward pass, on all GPU generations


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How scores are computed from q . k.

    Attributes:
      scale: factor on q . k.
      alibi: whether to add slope * (key position - query position).
      soft_cap: c of c * tanh(score / c) (Gemma 2); None for none.
      windowed: whether some layers attend to a window of past tokens only. The window is then a traced operand.
    """

    scale: float
    alibi: bool = False
    soft_cap: float | None = None
    windowed: bool = False


def attend(q, k, v, config: AttentionConfig, slopes_N, window, platform: str = "cpu", segments_BxT=None):
    """Causal attention of q_BxTxNxH over k, v_BxTxKxH; returns [B, T, N, H] in the dtype of q.

    `platform` is JAX's name of the platform that the program is compiled for. Tokens attend to equal `segments_BxT`
    only; cuDNN has no such mask, so plain XLA computes it on GPUs.
    """
    kernel = _attend_xla
    if _flash_fits(q, config):
        if platform == "tpu":
            return _attend_splash(q, k, v, slopes_N, window, segments_BxT, config=config)
        elif platform in ("gpu", "cuda") and q.shape[3] <= CUDNN_WIDEST_HEAD and not config.soft_cap:
            kernel = _attend_cudnn if segments_BxT is None else _attend_xla
    return checkpoint_name(kernel(q, k, v, slopes_N, window, segments_BxT, config=config), SAVED)


def _flash_fits(q, config: AttentionConfig) -> bool:
    """Flash kernels need bfloat16, whole blocks of tokens, and scores without a bias or a traced window."""
    extras = config.alibi or config.windowed
    return not extras and q.dtype == jnp.bfloat16 and q.shape[3] % 8 == 0 and q.shape[1] % 128 == 0


def _attend_xla(q, k, v, slopes_N, window, segments_BxT, *, config: AttentionConfig):
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    s_BxKxGxTxS = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * config.scale
    if config.soft_cap:
        s_BxKxGxTxS = config.soft_cap * jnp.tanh(s_BxKxGxTxS / config.soft_cap)
    past_TxS = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    if config.alibi:
        s_BxKxGxTxS = s_BxKxGxTxS - slopes_N.reshape(K, N // K, 1, 1) * past_TxS
    seen_TxS = past_TxS >= 0
    if config.windowed:
        seen_TxS &= past_TxS < window
    if segments_BxT is not None:
        seen_TxS &= (segments_BxT[:, :, None] == segments_BxT[:, None, :])[:, None, None]
    p_BxKxGxTxS = jax.nn.softmax(jnp.where(seen_TxS, s_BxKxGxTxS, -1e30), axis=-1).astype(v.dtype)
    y = jnp.einsum("bkgts,bskh->btkgh", p_BxKxGxTxS, v, preferred_element_type=jnp.float32)
    return y.reshape(B, T, N, H).astype(q.dtype)


def _attend_cudnn(q, k, v, slopes_N, window, segments_BxT, *, config: AttentionConfig):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=config.scale, implementation="cudnn")


def _attend_splash(q, k, v, slopes_N, window, segments_BxT, *, config: AttentionConfig):
    """JAX's splash attention kernel, which skips blocks that the causal mask removes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    seq, queries, width = q.shape[1:]
    widest = 1024 if width <= 128 else 512  # VMEM holds smaller blocks of wider heads
    block = next(b for b in (1024, 512, 256, 128) if b <= widest and seq % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=min(block, 512),
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=min(block, 512),
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((seq, seq))] * queries)
    kernel = splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=config.soft_cap,
        residual_checkpoint_name=SAVED,  # with the sums of its softmax, without which the backward pass runs it again
    )  # fmt: skip
    q, k, v = (x.swapaxes(1, 2) for x in (q * config.scale, k, v))
    segments = None if segments_BxT is None else splash.SegmentIds(segments_BxT, segments_BxT)
    y = jax.vmap(kernel)(q, k, v, segments)
    assert isinstance(y, jax.Array), "the kernel returns a tuple only with save_residuals"
    return y.swapaxes(1, 2)
