"""Cross-entropy that keeps its slopes, for GPUs whose logits are not sharded.

`mstrain.layers.loss` computes logits twice, because TPUs have little memory and collectives to hide. Here the forward
pass leaves the slopes of the loss, softmax minus one-hot, in the dtype of x, and the backward pass is two products of
them: a quarter fewer FLOPs, and no sums of gradients over many chunks. The logits themselves exist for one chunk of
tokens at a time.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from mstrain.gemm.copies import sum_copies
from mstrain.gemm.local import NN, NT, TN, dot
from mstrain.layers.logits import LogitsHead

KEPT = 4 * 2**30  # most bytes of slopes of a device
CHUNK = 2**31  # most bytes of float32 logits at a time
MASKED = -1e30
WIDEST = 1024  # columns whose maximum and sum one kernel computes from registers


def keeps_slopes(head: LogitsHead, x_TxD, w_DxV) -> bool:
    """Whether the loss of x and w, sharded as in `mstrain.layers.loss`, takes this path."""
    grid = head.plan.grid
    if grid.platform != "gpu" or grid.num_rows * grid.num_cols > 1:
        return False
    return x_TxD.shape[0] // grid.size(grid.copies) * w_DxV.shape[1] * x_TxD.dtype.itemsize <= KEPT


def forward(x_TxD, w_DxV, targets_T, head: LogitsHead):
    """(losses, float32 [T], and slopes, a tuple of chunks [T / count, V] of every device in the dtype of x)."""

    def local(x, w, targets):
        count = _divisor(len(x), at_least=math.ceil(4 * len(x) * w.shape[1] / CHUNK))
        w, losses, slopes = w.astype(x.dtype), [], []
        for chunk, ids in zip(jnp.split(x, count), jnp.split(targets, count), strict=True):
            if slopes:  # else XLA computes the logits of all chunks before their slopes
                chunk, losses[-1], slopes[-1] = lax.optimization_barrier((chunk, losses[-1], slopes[-1]))
            loss, slope = _of_chunk(head, dot(chunk, w, NN, jnp.float32), ids)
            losses.append(loss)
            slopes.append(slope.astype(x.dtype))
        return jnp.concatenate(losses), tuple(slopes)

    return head.on_mesh(local, (head.per_token,), (head.per_token, head.per_token))(x_TxD, w_DxV, targets_T)


def backward(x_TxD, w_DxV, slopes, g_T, head: LogitsHead):
    """Gradients of x and w."""
    summed = head.plan.grid.gradient_spec(w_DxV.shape)

    def local(x, w, slopes, g):
        weights = g[:, None]
        dx = jnp.concatenate([dot(slope, w.astype(x.dtype), NT, jnp.float32) for slope in slopes]) * weights
        weighted = jnp.split((x.astype(jnp.float32) * weights).astype(x.dtype), len(slopes))
        dw = sum(dot(x, slope, TN, jnp.float32) for x, slope in zip(weighted, slopes, strict=True))
        return dx.astype(x.dtype), sum_copies(dw, summed).astype(w.dtype)

    per_token = head.per_token
    return head.on_mesh(local, (per_token, per_token), (head.plan.input_layout.spec, summed))(x_TxD, w_DxV, slopes, g_T)


def _of_chunk(head: LogitsHead, logits_TxV, targets_T):
    """(losses, slopes) of some tokens from their logits before the soft cap."""
    columns = lax.iota(jnp.int32, logits_TxV.shape[1])
    counts, own = columns < head.vocab_size, targets_T[:, None]
    capped = jnp.where(counts, head.capped(logits_TxV), MASKED)
    log_total = _log_total(capped)
    loss = log_total - head.capped(jnp.take_along_axis(logits_TxV, own, axis=1))[:, 0]
    slope = jnp.exp(capped - log_total[:, None]) - (columns == own)
    if head.soft_cap:
        slope = slope * (1 - jnp.square(capped / head.soft_cap))
    return loss, jnp.where(counts, slope, 0)


def _log_total(x_TxV):
    """logsumexp of rows, by blocks of columns, of which one kernel reads every number once."""
    tokens, width = x_TxV.shape
    block = max(n for n in range(1, min(width, WIDEST) + 1) if width % n == 0)
    x = x_TxV.reshape(tokens, width // block, block)
    peak = jnp.max(x, axis=2, keepdims=True)
    total = jnp.sum(jnp.exp(x - peak), axis=2)
    return jax.nn.logsumexp(peak[..., 0], b=total, axis=1)


def _divisor(number: int, at_least: int) -> int:
    return next(n for n in range(max(at_least, 1), number + 1) if number % n == 0)
