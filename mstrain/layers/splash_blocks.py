"""Attention between a chunk of queries and a chunk of keys by JAX's splash attention kernel for TPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mstrain.layers.attention_blocks import Blocks, Positions
from mstrain.layers.splash import splash, splash_kernel


@dataclasses.dataclass(frozen=True)
class SplashBlocks(Blocks):
    """`Blocks` by splash attention: chunks of whole blocks of tokens, no ALiBi and no windows.

    Attributes:
      interpret: run the kernels without a TPU, for tests.
    """

    interpret: bool = False

    def forward(self, q, k, v, at: Positions, diagonal: bool):
        kernel = self._kernel(q, diagonal, save_residuals=True)
        y, (total,) = jax.vmap(kernel)(q * self.config.scale, k, v, _ids(at.segments))
        return y.astype(jnp.float32), total

    def backward(self, q, y, total, dy, k, v, at: Positions, diagonal: bool):
        kernel = self._kernel(q, diagonal)
        # The kernel's own backward pass takes the result and the sums of one call. Those over all keys make its
        # gradients the block's part of the whole.
        backward = functools.partial(splash._splash_attention_bwd, **kernel.kwargs)

        def one(q, k, v, ids, y, total, dy):
            saved = (q, k, v, ids, None, y, total, kernel.dq_mask_info, kernel.dkv_mask_info)
            return backward(res=saved, do=dy)[3:6]

        dq, dk, dv = jax.vmap(one)(q * self.config.scale, k, v, _ids(at.segments), y, total, dy)
        return dq.astype(jnp.float32) * self.config.scale, dk.astype(jnp.float32), dv.astype(jnp.float32)

    def _kernel(self, q, diagonal: bool, save_residuals: bool = False):
        heads, tokens, width = q.shape[1:]
        cap = self.config.soft_cap
        return splash_kernel(
            tokens, heads, width, diagonal, attn_logits_soft_cap=cap, save_residuals=save_residuals,
            interpret=self.interpret,
        )  # fmt: skip


def _ids(segments):
    return None if segments is None else splash.SegmentIds(*segments)
