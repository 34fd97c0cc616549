"""The order in which the features of a weight are stored, and the conversion to and from canonical order.

Canonical order is `W[in, out]`, with fused projections as consecutive segments (all queries, then all keys, then all
values). On a mesh of R x C four features of a plan need another order:

* A fused projection is split on each column shard, so column shard j stores its part of every segment contiguously.
* Features that do not divide are padded with zeros (`mstrain.gemm.padding`).
* MeshSlice with S slices needs contiguous slices. Activations have their features in canonical order over the C
  columns, so slice s consists of the s-th piece of each of the C column shards. The row-sharded dim of a weight is
  stored such that the s-th pieces of the R row shards hold the same features in the same order. With R = C this is the
  canonical order.
* Of two activations side by side, every shard has its part of both.

Orders are applied by reshapes and transposes, so the compiler converts a sharded array with all-to-alls and does not
gather it. Leading dims (layers stacked by a scan) are unchanged.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mstrain.gemm.padding import Span


def _anywhere(x, dim, stored):
    return x


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage order of a parameter whose canonical shape ends in `shape`.

    Attributes:
      shape: canonical trailing shape: (in, out) of a kernel, (experts, in, out) of those of experts, (out,) of a bias,
        (vocab_size, features) of a table.
      segments: fused segments of the last canonical dim with their padding; none for one segment without padding.
      columns: column shards C.
      rows: row shards R.
      slices: slice count S of the row-sharded dim (the first stored dim).
      transposed: stored as [out, in] (X-stationary dataflow).
      first: the first of two canonical dims with its padding; None without padding.
      halves: shards of the inputs if they are two halves of which every shard holds its part of both; 1 for one whole.
    """

    shape: tuple[int, ...]
    segments: tuple[Span, ...] = ()
    columns: int = 1
    rows: int = 1
    slices: int = 1
    transposed: bool = False
    first: Span | None = None
    halves: int = 1

    @property
    def _is_fused(self) -> bool:
        return len(self.segments) > 1 and self.columns > 1

    @property
    def _is_padded(self) -> bool:
        return any(span.steps for span in (*self.segments, *([self.first] if self.first else [])))

    @property
    def _is_slice_major(self) -> bool:
        return self.slices > 1 and self.rows != self.columns

    @property
    def _is_reordered(self) -> bool:
        return self._is_fused or self._is_padded or self.halves > 1

    @property
    def is_canonical(self) -> bool:
        """Whether stored and canonical order are the same, without padding."""
        return not (self._is_reordered or self._is_slice_major or self.transposed)

    def from_canonical(self, x, place=_anywhere):
        """Converts canonical [..., *shape] to stored order.

        `place(x, dim, stored)` may constrain the sharding of x between the steps. With dim -1 or -2, x should be
        sharded on that dim only, so that the other dim is reordered without communication. With dim None, x should be
        sharded as in a training step. `stored` is whether a transposed kernel is in its stored orientation.
        """
        if self._is_reordered:
            x = place(x, -2, False)
            if self.first:
                x = jnp.swapaxes(self.first.pad(jnp.swapaxes(x, -1, -2)), -1, -2)
            x = self._alternate(_interleave(x, self.segments, self.columns), 2, self.halves, place)
        if self.transposed:
            x = jnp.swapaxes(x, -1, -2)
        elif self._is_slice_major:
            x = place(x, None, True)
        return self._slice_major(x, self.columns, self.rows, place)

    def to_canonical(self, x, place=_anywhere):
        """Converts stored order to canonical [..., *shape]; `place` as in `from_canonical`."""
        x = self._slice_major(x, self.rows, self.columns, place)
        if self.transposed:
            x = jnp.swapaxes(x, -1, -2)
        elif self._is_slice_major:
            x = place(x, None, False)
        if self._is_reordered:
            x = _separate(self._alternate(x, self.halves, 2, place), self.segments, self.columns)
            if self.first:
                x = jnp.swapaxes(self.first.crop(jnp.swapaxes(x, -1, -2)), -1, -2)
            x = place(x, -2, False)
        return x

    def places(self) -> list[jax.Array]:
        """The canonical index of every stored element, int32, along each dim in canonical order; -1 for padding.

        Inputs of all experts count as one dim.
        """
        mine, last = {"slices": self.slices if self.transposed else 1}, self.shape[-1]
        ahead = (1,) if len(self.shape) > 1 else ()
        found = [dataclasses.replace(self, shape=(*ahead, last), first=None, halves=1, **mine)]
        if ahead:
            mine = {"slices": 1 if self.transposed else self.slices}
            found.insert(0, dataclasses.replace(self, shape=(*self.shape[-2:-1], 1), segments=(), **mine))
        each = [x.from_canonical(jnp.arange(1, max(x.shape) + 1).reshape(x.shape)).reshape(-1) - 1 for x in found]
        if len(self.shape) == 3:
            each[0] = (jnp.arange(self.shape[0])[:, None] * (self.shape[1] + 1) + each[0]).reshape(-1)
        return each

    def _alternate(self, x, outer: int, inner: int, place):
        """Reorders the inputs from `outer` x `inner` pieces to `inner` x `outer`, where they are two halves."""
        if self.halves > 1:
            x = place(x, -1, False)
            pieces = x.reshape(*x.shape[:-2], outer, inner, -1, x.shape[-1])
            x = place(jnp.swapaxes(pieces, -4, -3).reshape(x.shape), -1, False)
        return place(x, -2, False)

    def _slice_major(self, x, shards_from: int, shards_to: int, place):
        """Reorders the first stored dim from `shards_from` x slices pieces to `shards_to` x slices pieces."""
        if not self._is_slice_major:
            return x
        x = place(x, -1, True)
        lead, dim, last = x.shape[:-2], x.shape[-2], x.shape[-1]
        x = x.reshape(*lead, shards_from, self.slices, dim // (shards_from * self.slices), last)
        x = jnp.swapaxes(x, -4, -3)
        x = x.reshape(*lead, self.slices, shards_to, dim // (shards_to * self.slices), last)
        return place(jnp.swapaxes(x, -4, -3).reshape(*lead, dim, last), -1, True)


def _interleave(x, segments: tuple[Span, ...], columns: int):
    """Pads [segment 1 | segment 2 ...] and converts to [shard 1 of each segment | shard 2 of each segment ...]."""
    if not segments:
        return x
    parts = jnp.split(x, _offsets([span.size for span in segments]), axis=-1)
    parts = [span.pad(part) for span, part in zip(segments, parts, strict=True)]
    if len(parts) == 1 or columns == 1:
        return jnp.concatenate(parts, axis=-1)
    lead = x.shape[:-1]
    return jnp.concatenate([part.reshape(*lead, columns, -1) for part in parts], axis=-1).reshape(*lead, -1)


def _separate(x, segments: tuple[Span, ...], columns: int):
    """Undoes `_interleave`."""
    if not segments:
        return x
    lead, count = x.shape[:-1], columns if len(segments) > 1 else 1
    parts = jnp.split(x.reshape(*lead, count, -1), _offsets([span.stored // count for span in segments]), axis=-1)
    cropped = [span.crop(part.reshape(*lead, -1)) for span, part in zip(segments, parts, strict=True)]
    return jnp.concatenate(cropped, axis=-1)


def _offsets(widths):
    ends, total = [], 0
    for width in widths[:-1]:
        total += width
        ends.append(total)
    return ends
