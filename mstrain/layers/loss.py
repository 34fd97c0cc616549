"""Output projection and cross-entropy in one: the logits exist in chunks only, in the forward and backward pass.

Logits [T, V] of one device are computed, reduced and dropped chunk by chunk, along their larger dim. Of the smaller
dim's operand, activations or kernel, a whole gathered copy is kept, and its gradient is summed over the chunks in
float32. The other operand is gathered and its gradient is scattered by chunks, so chunks communicate no more than the
whole. The logits stay sharded over the vocabulary (Megatron-LM; Shoeybi et al., 2019): a maximum, a sum and a target
logit per token are reduced, and no logits.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from mstrain.gemm.copies import sum_copies
from mstrain.gemm.local import NN, NT, TN, all_gather, all_reduce, axis_index, axis_size, dot, reduce_scatter
from mstrain.gemm.tiles import LANES
from mstrain.layers import kept_loss
from mstrain.layers.logits import MASKED, LogitsHead

WHOLE = 4 * 2**20  # bytes of float32 logits of a device that are one chunk
LARGEST = 64 * 2**20  # bytes of a chunk of larger logits
LARGEST_ON_GPU = 2**30  # where the gradient that all chunks add to does not stay near the product
FEWEST = 8  # chunks of larger logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(x_TxD: jax.Array, w_DxV: jax.Array, targets_T: jax.Array, head: LogitsHead) -> jax.Array:
    """Negative log-likelihood in nats of each target (int32 [T]) under the logits x w; float32 [T].

    x is sharded as `head.plan.input_layout`, w as the plan's weight, targets and result as the tokens of the logits.
    """
    return _forward(x_TxD, w_DxV, targets_T, head)[0]


def _forward(x, w, targets, head: LogitsHead):
    if kept_loss.keeps_slopes(head, x, w):
        loss, kept = kept_loss.forward(x, w, targets, head)
        return loss, (x, w, kept)

    def local(x, w, targets):
        chunks = _Chunks(head, x, w, targets)

        def add(carry, i):
            return chunks.accumulate(carry, i), None

        start = (jnp.full(targets.shape, -jnp.inf), jnp.zeros(targets.shape), jnp.zeros(targets.shape))
        (peak, total, target), _ = lax.scan(add, start, jnp.arange(chunks.count))
        axes = head.plan.grid.cols
        highest = lax.pmax(peak, axes) if axes else peak
        log_total = highest + jnp.log(all_reduce(total * jnp.exp(peak - highest), axes))
        return log_total - all_reduce(target, axes), log_total

    loss, log_total = head.on_mesh(local, (head.per_token,), (head.per_token, head.per_token))(x, w, targets)
    return loss, (x, w, (targets, log_total))


def _backward(head: LogitsHead, saved, g_T):
    x_TxD, w_DxV, rest = saved
    if kept_loss.keeps_slopes(head, x_TxD, w_DxV):
        return *kept_loss.backward(x_TxD, w_DxV, rest, g_T, head), None
    plan = head.plan
    summed = plan.grid.gradient_spec(w_DxV.shape)

    def local(x, w, targets, log_total, g):
        chunks = _Chunks(head, x, w, targets)

        def add(carry, i):
            return chunks.add_gradients(carry, i, log_total, g), None

        (dx, dw), _ = lax.scan(add, chunks.zero_gradients(), jnp.arange(chunks.count))
        dx, dw = chunks.scattered(dx, dw)
        return dx.astype(x.dtype), sum_copies(dw.astype(jnp.float32), summed).astype(w.dtype)

    per_token = (head.per_token,) * 3
    dx, dw = head.on_mesh(local, per_token, (plan.input_layout.spec, summed))(x_TxD, w_DxV, *rest, g_T)
    return dx, dw, None


cross_entropy.defvjp(_forward, _backward)


class _Chunks:
    """The chunks of one device's logits, in `shard_map`, and what each contributes to the loss and to gradients.

    With dataflow `os`, x is gathered over columns and w over rows. With `rs`, x is gathered over the columns, that is
    over tokens, and partial sums of logits are scattered over rows.
    """

    def __init__(self, head: LogitsHead, x, w, targets):
        self._head, self._x, self._w, self._targets = head, x, w, targets
        grid = head.plan.grid
        self._rows, self._cols, self._swap = grid.rows, grid.cols, head.plan.dataflow == "rs"
        self._shards = axis_size(self._cols) if self._swap else 1  # that a gathered chunk of tokens consists of
        tokens, width = targets.shape[0] // self._shards, w.shape[1]
        scattered = self._swap and axis_size(self._rows) > 1
        largest = LARGEST_ON_GPU if grid.platform == "gpu" else LARGEST
        self._of_tokens, self._size = cut_logits(tokens, self._shards, width, not scattered, largest)
        self._here = tokens if self._of_tokens else width
        self.count = math.ceil(self._here / self._size)
        if self._of_tokens:
            self._whole = all_gather(w.astype(x.dtype), self._rows, 0)
        else:
            self._whole = all_gather(x, self._cols, self._gathered_dim)

    def accumulate(self, carry, i):
        """Running (maximum, sum of exponentials, target logit) of every token, with those of chunk i."""
        logits, is_target, _, _ = self._logits(i)
        begin = self._begin(i)
        peak, total, target = (self._tokens(x, begin) for x in carry)
        highest = jnp.maximum(peak, jnp.max(logits, axis=1))
        total = total * jnp.exp(peak - highest) + jnp.sum(jnp.exp(logits - highest[:, None]), axis=1)
        new = (highest, total, target + jnp.sum(jnp.where(is_target, logits, 0), axis=1))
        if not self._of_tokens:
            return new
        return tuple(self._with_tokens(old, x, begin) for old, x in zip(carry, new, strict=True))

    def zero_gradients(self):
        """Of x and w: scattered for the operand that is cut, whole in float32 for the other."""
        whole = jnp.zeros(self._whole.shape, jnp.float32)
        return (jnp.zeros_like(self._x), whole) if self._of_tokens else (whole, jnp.zeros_like(self._w))

    def add_gradients(self, carry, i, log_total, g):
        """(dx, dw) with those of chunk i."""
        dx, dw = carry
        logits, is_target, x, w = self._logits(i)
        begin = self._begin(i)
        log_total, g = self._tokens(log_total, begin), self._tokens(g, begin)
        slope = jnp.exp(logits - log_total[:, None]) - is_target
        if self._head.soft_cap:
            slope = slope * (1 - jnp.square(logits / self._head.soft_cap))
        slope = jnp.where(logits > MASKED, slope * g[:, None], 0).astype(x.dtype)
        if self._swap:
            slope = all_gather(slope, self._rows, 0)
        if self._of_tokens:
            part = reduce_scatter(dot(slope, w, NT), self._cols, self._gathered_dim)
            return lax.dynamic_update_slice(dx, part, (begin, 0)), dw + dot(x, slope, TN, jnp.float32)
        part = dot(x, slope, TN)
        part = (part if self._swap else reduce_scatter(part, self._rows, 0)).astype(dw.dtype)
        part += lax.dynamic_slice_in_dim(dw, begin, self._size, 1)  # the last chunk may begin within the one before
        return dx + dot(slope, w, NT, jnp.float32), lax.dynamic_update_slice(dw, part, (0, begin))

    def scattered(self, dx, dw):
        """Shards of the gradients after the last chunk."""
        dtype = self._x.dtype
        if self._of_tokens:
            return dx, reduce_scatter(dw.astype(dtype), self._rows, 0)
        return reduce_scatter(dx.astype(dtype), self._cols, self._gathered_dim), dw

    def _begin(self, i):
        return jnp.minimum(i * self._size, self._here - self._size)

    @property
    def _gathered_dim(self) -> int:
        """The dim of x that the columns shard."""
        return 0 if self._swap else 1

    def _tokens(self, x_T, begin):
        """Those of a chunk: the same part of every shard of tokens."""
        if not self._of_tokens:
            return x_T
        return lax.dynamic_slice_in_dim(x_T.reshape(self._shards, -1), begin, self._size, 1).reshape(-1)

    def _with_tokens(self, x_T, chunk, begin):
        parts = x_T.reshape(self._shards, -1), chunk.reshape(self._shards, -1)
        return lax.dynamic_update_slice(*parts, (0, begin)).reshape(-1)

    def _logits(self, i):
        """Float32 logits of chunk i after soft cap and mask, whether each is the target's, and the two operands."""
        begin = self._begin(i)
        if self._of_tokens:
            x, w, first = lax.dynamic_slice_in_dim(self._x, begin, self._size), self._whole, 0
            x = all_gather(x, self._cols, self._gathered_dim)
        else:
            x, first = self._whole, begin
            w = lax.dynamic_slice_in_dim(self._w, begin, self._size, 1).astype(x.dtype)
            w = w if self._swap else all_gather(w, self._rows, 0)
        if self._swap and axis_size(self._rows) > 1:
            logits = reduce_scatter(dot(x, w, NN), self._rows, 0)
        else:
            logits = dot(x, w, NN, jnp.float32)
        columns = first + lax.iota(jnp.int32, w.shape[1])
        token_ids = columns + axis_index(self._cols) * self._w.shape[1]
        counts = token_ids < self._head.vocab_size
        if not self._of_tokens:
            counts &= columns >= i * self._size
        logits = jnp.where(counts, self._head.capped(logits), MASKED)
        is_target = counts & (token_ids == self._tokens(self._targets, begin)[:, None])
        return logits, is_target, x, w


def cut_logits(tokens: int, shards: int, width: int, may_cut_tokens: bool, largest: int = LARGEST) -> tuple[bool, int]:
    """(whether tokens are cut and not the vocabulary, size of a chunk) of logits [shards x tokens, width]."""
    size = 4 * shards * tokens * width
    if size <= WHOLE:
        return False, width
    count = max(FEWEST, math.ceil(size / largest))
    if may_cut_tokens and shards * tokens > width and tokens >= count:
        divides = max(n for n in range(1, tokens // count + 1) if tokens % n == 0)
        if divides >= tokens // (4 * count):
            return True, divides
    chunk = math.ceil(width / count)
    return False, min(width, math.ceil(chunk / LANES) * LANES if chunk > LANES else chunk)
