"""Cross-entropy that keeps its slopes, for GPUs whose logits are not sharded.

`mstrain.layers.loss` computes logits twice, because TPUs have little memory and collectives to hide. Here the forward
pass leaves the slopes of the loss, softmax minus one-hot, in the dtype of x, and the backward pass is two products of
them: a quarter fewer FLOPs, and no sums of gradients over many chunks. The logits themselves exist for one chunk of
tokens at a time, and are read twice: for the maximum of a token, and for its exponentials with their sum. So the slopes
are kept times this sum, by which the backward pass divides the rows of its products.
"""

import math

import jax.numpy as jnp
from jax import lax

from mstrain.gemm.copies import sum_copies
from mstrain.gemm.local import NN, NT, TN, dot
from mstrain.layers.logits import MASKED, LogitsHead

KEPT = 4 * 2**30  # most bytes of slopes of a device
CHUNK = 2**31  # most bytes of float32 logits at a time


def keeps_slopes(head: LogitsHead, x_TxD, w_DxV) -> bool:
    """Whether the loss of x and w, sharded as in `mstrain.layers.loss`, takes this path."""
    grid = head.plan.grid
    if grid.platform != "gpu" or grid.num_rows * grid.num_cols > 1:
        return False
    return x_TxD.shape[0] // grid.size(grid.copies) * w_DxV.shape[1] * x_TxD.dtype.itemsize <= KEPT


def forward(x_TxD, w_DxV, targets_T, head: LogitsHead):
    """(losses, float32 [T], what `backward` takes as `kept`).

    That is sums of exponentials, float32 [T], and slopes times these, a tuple of chunks [T / count, V] of every device
    in the dtype of x.
    """

    def local(x, w, targets):
        count = _divisor(len(x), at_least=math.ceil(4 * len(x) * w.shape[1] / CHUNK))
        w, parts = w.astype(x.dtype), []
        for chunk, ids in zip(jnp.split(x, count), jnp.split(targets, count), strict=True):
            if parts:  # else XLA computes the logits of all chunks before their slopes
                chunk, parts[-1] = lax.optimization_barrier((chunk, parts[-1]))
            parts.append(_of_chunk(head, dot(chunk, w, NN, jnp.float32), ids, x.dtype))
        losses, totals, slopes = zip(*parts, strict=True)
        return jnp.concatenate(losses), (jnp.concatenate(totals), slopes)

    return head.on_mesh(local, (head.per_token,), (head.per_token,) * 2)(x_TxD, w_DxV, targets_T)


def backward(x_TxD, w_DxV, kept, g_T, head: LogitsHead):
    """Gradients of x and w."""
    summed = head.plan.grid.gradient_spec(w_DxV.shape)

    def local(x, w, kept, g):
        total, slopes = kept
        weights = (g / total)[:, None]
        dx = jnp.concatenate([dot(slope, w.astype(x.dtype), NT, jnp.float32) for slope in slopes]) * weights
        weighted = jnp.split((x.astype(jnp.float32) * weights).astype(x.dtype), len(slopes))
        dw = sum(dot(x, slope, TN, jnp.float32) for x, slope in zip(weighted, slopes, strict=True))
        return dx.astype(x.dtype), sum_copies(dw, summed).astype(w.dtype)

    per_token = (head.per_token,) * 2
    return head.on_mesh(local, per_token, (head.plan.input_layout.spec, summed))(x_TxD, w_DxV, kept, g_T)


def _of_chunk(head: LogitsHead, logits_TxV, targets_T, dtype):
    """(losses, sums of exponentials, slopes times these) of some tokens from their logits before the soft cap."""
    counts, own = lax.iota(jnp.int32, logits_TxV.shape[1]) < head.vocab_size, targets_T[:, None]
    capped = jnp.where(counts, head.capped(logits_TxV), MASKED)
    peak = jnp.max(capped, axis=1, keepdims=True)
    exponentials = jnp.exp(capped - peak)
    total = jnp.sum(exponentials, axis=1, keepdims=True)
    target = head.capped(jnp.take_along_axis(logits_TxV, own, axis=1))
    slope, of_target = exponentials, jnp.exp(target - peak) - total
    if head.soft_cap:
        slope, of_target = (
            x * (1 - jnp.square(y / head.soft_cap)) for x, y in ((slope, capped), (of_target, target))
        )  # fmt: skip
        slope = jnp.where(counts, slope, 0)
    rows = jnp.arange(len(targets_T))
    slope = slope.astype(dtype).at[rows, targets_T].set(of_target[:, 0].astype(dtype), unique_indices=True)
    return (jnp.log(total) + peak - target)[:, 0], total[:, 0], slope


def _divisor(number: int, at_least: int) -> int:
    return next(n for n in range(max(at_least, 1), number + 1) if number % n == 0)
