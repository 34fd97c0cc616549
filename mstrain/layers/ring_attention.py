"""Attention between the parts of sequences, in as many steps as there are parts. Scores are those of two chunks.

With `ring`, keys and values pass from device to device while each computes with those it has (ring attention; Liu et
al., 2023). With `gather`, every device gets those of all parts first and then computes the same steps.

In step i of P, part p has the keys and values of part p - i. A part is two chunks of its sequence, p and 2 P - 1 - p
(`mstrain.layers.sequence_split`). Of the four pairs of a chunk of queries and a chunk of keys, two have their keys in
the past in every step: (1, 0), and (0, 0) or, where p - i wraps, (1, 1). Every device computes these two, so the work
is even. Step 0 has the pairs on the diagonal and (1, 0). Blocks are joined by the sums of their softmax.

The backward pass goes round the ring again, or gathers again, with gradients of keys and values in float32. It is not
JAX's, which would save what each step received: the keys and values of the whole sequence. What is saved is one part
of queries, keys, values and results with the sums of their softmax. No transfer of a ring waits for the compute of its
step. The last step of a ring sends keys that nothing uses; apart from the others it would compile its kernels again.

Shapes: [2 chunks, B, N or K heads, T tokens of a chunk, H]; keys and values are stacked, [2, 2, B, K, T, H].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mstrain.gemm.local import all_gather, axis_index, ppermute, reduce_scatter
from mstrain.layers.attention_blocks import Blocks, Positions
from mstrain.layers.attention_kernels import SAVED
from mstrain.layers.sequence_split import SequenceSplit


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def attend_in_steps(q, kv, sinks_N, slopes_N, window, segments_BxS, blocks: Blocks, split: SequenceSplit):
    """Attention of q over the keys and values of all parts; called in `jax.shard_map`, result like q.

    `segments_BxS` are those of whole sequences, or None; `sinks_N` are scores of no key, or None.
    """
    return _forward(q, kv, sinks_N, slopes_N, window, segments_BxS, blocks, split)[0]


def _forward(q, kv, sinks_N, slopes_N, window, segments_BxS, blocks, split):
    steps = _Steps(split, q.shape[3], (slopes_N, window, segments_BxS), blocks.forward)

    def join(carry, kv, pairs):
        found = steps.compute((q,), kv, pairs)
        for n, i in enumerate(pairs.queries):
            old, total = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in carry)
            new, new_total = (x[n] for x in found)
            both = jnp.logaddexp(total, new_total)
            y = old * jnp.exp(total - both)[..., None] + new * jnp.exp(new_total - both)[..., None]
            carry = tuple(lax.dynamic_update_index_in_dim(x, z, i, 0) for x, z in zip(carry, (y, both), strict=True))
        return carry

    def advance(carry, i):
        carry, arrived = carry
        coming = steps.send(arrived)
        return (join(carry, arrived, steps.pairs(i)), coming), None

    def from_whole(carry, i):
        return join(carry, whole[steps.source(i)], steps.pairs(i)), None

    start, later = steps.compute((q,), kv, steps.diagonal), jnp.arange(1, split.parts)
    if split.exchange == "gather":
        whole = all_gather(kv[None], split.axes, 0)
        carry, _ = lax.scan(from_whole, join(start, kv, steps.beside), later)
    else:
        (carry, _), _ = lax.scan(advance, (join(start, kv, steps.beside), steps.send(kv)), later)
    y, total = carry
    if sinks_N is not None:
        total = jnp.logaddexp(total, sinks_N[:, None])
        y = y * jnp.exp(carry[1] - total)[..., None]
    y, total = (checkpoint_name(x, SAVED) for x in (y.astype(q.dtype), total))
    return y, (q, kv, sinks_N, slopes_N, window, segments_BxS, y, total)


def _backward(blocks, split, saved, dy):
    q, kv, sinks_N, slopes_N, window, segments_BxS, y, total = saved
    steps = _Steps(split, q.shape[3], (slopes_N, window, segments_BxS), blocks.backward)

    def add(gradients, kv, pairs):
        """Gradients of queries and of these keys and values, float32, with those of `pairs`."""
        dq, dkv = gradients
        for_queries, *for_keys = steps.compute((q, y, total, dy), kv, pairs)
        for n, (i, j) in enumerate(zip(pairs.queries, pairs.keys, strict=True)):
            dq, dkv = _add_at(dq, for_queries[n], 0, i), _add_at(dkv, jnp.stack([x[n] for x in for_keys]), 1, j)
        return dq, dkv

    def advance(carry, i):
        dq, arrived, dkv = carry
        coming, sent = steps.send(arrived), steps.send(dkv)
        dq, own = add((dq, zeros), arrived, steps.pairs(i))
        return (dq, coming, sent + own), None

    def from_whole(carry, i):
        dq, dwhole = carry
        dq, dkv = add((dq, zeros), whole[steps.source(i)], steps.pairs(i))
        return (dq, lax.dynamic_update_index_in_dim(dwhole, dkv, steps.source(i), 0)), None

    zeros, later = jnp.zeros(kv.shape, jnp.float32), jnp.arange(1, split.parts)
    dq, dkv = add((jnp.zeros(q.shape, jnp.float32), zeros), kv, steps.diagonal)
    dq, dkv = add((dq, dkv), kv, steps.beside)
    if split.exchange == "gather":
        whole = all_gather(kv[None], split.axes, 0)
        dwhole = lax.dynamic_update_index_in_dim(jnp.zeros(whole.shape, jnp.float32), dkv, steps.part, 0)
        (dq, dwhole), _ = lax.scan(from_whole, (dq, dwhole), later)
        dkv = reduce_scatter(dwhole, split.axes, 0)[0]
    else:
        (dq, _, dkv), _ = lax.scan(advance, (dq, steps.send(kv), dkv), later)
        dkv = steps.send(dkv)
    return dq.astype(q.dtype), dkv.astype(kv.dtype), _sink_gradients(sinks_N, y, total, dy), None, None, None


def _sink_gradients(sinks_N, y, total, dy):
    if sinks_N is None:
        return None
    mean = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(sinks_N[:, None] - total) * mean, axis=(0, 1, 3))


attend_in_steps.defvjp(_forward, _backward)


def _add_at(total, x, dim: int, index):
    """`total` with x added to its element `index` of `dim`."""
    old = lax.dynamic_index_in_dim(total, index, dim, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, old + x, index, dim)


class _Pairs(NamedTuple):
    """Pairs of a chunk of queries and a chunk of the keys of part `source`; numbers of chunks may be traced."""

    queries: tuple
    keys: tuple
    source: Any
    diagonal: bool = False


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The steps of one device.

    Attributes:
      chunk: tokens of a chunk.
      extras: slopes, window, segments of whole sequences.
      block: computes one pair: a method of `Blocks`.
    """

    split: SequenceSplit
    chunk: int
    extras: tuple
    block: Callable

    @property
    def part(self):
        return axis_index(self.split.axes)

    @property
    def diagonal(self) -> _Pairs:
        return _Pairs((0, 1), (0, 1), self.part, True)

    @property
    def beside(self) -> _Pairs:
        """The other pair of step 0."""
        return _Pairs((1,), (0,), self.part)

    def source(self, i):
        """The part whose keys step i has."""
        return (self.part - i) % self.split.parts

    def pairs(self, i) -> _Pairs:
        """Those of step i above 0."""
        both = jnp.where(self.part >= i, 0, 1)  # keys of an earlier part, or of a later one
        return _Pairs((1, both), (0, both), self.source(i))

    def send(self, x):
        """Sends x to the next part; returns that of the part before."""
        return ppermute(x, self.split.axes, 1)

    def compute(self, queries, kv, pairs: _Pairs):
        """Results of `block` for all pairs, stacked, from chunks of each of `queries` and of keys and values."""
        slopes_N, window, whole = self.extras
        begins = [self._begins(*of) for of in ((self.part, pairs.queries), (pairs.source, pairs.keys))]
        places = tuple(begin[:, None] + jnp.arange(self.chunk, dtype=jnp.int32) for begin in begins)
        segments = None
        if whole is not None:
            cut = jax.vmap(lambda begin: lax.dynamic_slice_in_dim(whole, begin, self.chunk, 1))
            segments = tuple(map(cut, begins))
        if not pairs.diagonal:  # whose chunks are all, in order
            queries, kv = (_select(x, pairs.queries) for x in queries), (_select(x, pairs.keys) for x in kv)
        arrays = (*queries, *kv, places, segments)

        def one(arrays):
            *chunks, places, segments = arrays
            return self.block(*chunks, Positions(slopes_N, window, places, segments), pairs.diagonal)

        return jax.vmap(one)(arrays)

    def _begins(self, part, chunks):
        later = 2 * self.split.parts - 1 - part
        return jnp.stack([jnp.where(chunk == 0, part, later) for chunk in chunks]) * self.chunk


def _select(x, numbers: tuple):
    """The chunks of x with these numbers."""
    return jnp.stack([lax.dynamic_index_in_dim(x, n, keepdims=False) for n in numbers])
