"""JAX's splash attention kernel for TPUs."""

from typing import Any

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks


def splash_kernel(tokens: int, heads: int, width: int, causal: bool, local: int | None = None, **options) -> Any:
    """The kernel of one sequence: q [heads, tokens, width], k, v [K, tokens, width]; skips what the mask removes.

    `local`: tokens attend to as many past ones only, themselves included; None for all.
    `options` as of `splash.make_splash_mha`.
    """
    widest = 1024 if width <= 128 else 512  # VMEM holds smaller blocks of wider heads
    block = next(b for b in (1024, 512, 256, 128) if b <= widest and tokens % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=min(block, 512),
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=min(block, 512),
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    shape = tokens, tokens
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    if local is not None:
        mask = masks.LocalMask(shape, (local - 1, 0), 0)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1, **options
    )
