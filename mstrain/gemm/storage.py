"""The order in which the features of a weight are stored, and the conversion to and from canonical order.

Canonical order is `W[in, out]`, with fused projections as consecutive segments (all queries, then all keys, then all
values). On a mesh of R x C two features of a plan need another order:

* A fused projection is split on each column shard, so column shard j stores its part of every segment contiguously.
* MeshSlice with S slices needs contiguous slices. Activations have their features in canonical order over the C
  columns, so slice s consists of the s-th piece of each of the C column shards. The row-sharded dim of a weight is
  stored such that the s-th pieces of the R row shards hold the same features in the same order. With R = C this is the
  canonical order.

Orders are applied by reshapes and transposes, so the compiler converts a sharded array with all-to-alls and does not
gather it. Leading dims (layers stacked by a scan) are unchanged.
"""

import dataclasses

import jax.numpy as jnp


def _anywhere(x, dim, stored):
    return x


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage order of a parameter whose canonical shape ends in `shape`.

    Attributes:
      shape: canonical trailing shape: (in, out) of a kernel, (out,) of a bias, (vocab_size, features) of a table.
      segments: widths of the fused segments of the last canonical dim; one segment means no reordering.
      columns: column shards C.
      rows: row shards R.
      slices: slice count S of the row-sharded dim (the first stored dim).
      transposed: stored as [out, in] (X-stationary dataflow).
      padding: zeros appended to each canonical dim, so that a vocabulary of any size divides into equal shards.
    """

    shape: tuple[int, ...]
    segments: tuple[int, ...] = ()
    columns: int = 1
    rows: int = 1
    slices: int = 1
    transposed: bool = False
    padding: tuple[int, ...] = ()

    @property
    def _is_fused(self) -> bool:
        return len(self.segments) > 1 and self.columns > 1

    @property
    def _is_slice_major(self) -> bool:
        return self.slices > 1 and self.rows != self.columns

    @property
    def is_canonical(self) -> bool:
        """Whether stored and canonical order are the same, without padding."""
        return not (self._is_fused or self._is_slice_major or self.transposed or any(self.padding))

    def from_canonical(self, x, place=_anywhere):
        """Converts canonical [..., *shape] to stored order.

        `place(x, dim, stored)` may constrain the sharding of x between the steps. With dim -1 or -2, x should be
        sharded on that dim only, so that the other dim is reordered without communication. With dim None, x should be
        sharded as in a training step. `stored` is whether a transposed kernel is in its stored orientation.
        """
        if self._is_fused or any(self.padding):
            x = place(x, -2, False)
            if any(self.padding):
                x = jnp.pad(x, [(0, 0)] * (x.ndim - len(self.shape)) + [(0, n) for n in self.padding])
            x = place(_per_segment(x, self.segments, self.columns, interleave=True), -2, False)
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
        if self._is_fused or any(self.padding):
            x = _per_segment(place(x, -2, False), self.segments, self.columns, interleave=False)
            if any(self.padding):
                x = x[(..., *(slice(0, n) for n in self.shape))]
            x = place(x, -2, False)
        return x

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


def _per_segment(x, segments, columns, interleave):
    """Converts [segment 1 | segment 2 ...] to, or from, [shard 1 of each segment | shard 2 of each segment ...]."""
    if len(segments) < 2 or columns == 1:
        return x
    lead = x.shape[:-1]
    if interleave:
        parts = jnp.split(x, _offsets(segments), axis=-1)
        parts = [part.reshape(*lead, columns, -1) for part in parts]
        return jnp.concatenate(parts, axis=-1).reshape(*lead, -1)
    x = x.reshape(*lead, columns, -1)
    parts = jnp.split(x, _offsets([n // columns for n in segments]), axis=-1)
    return jnp.concatenate([part.reshape(*lead, -1) for part in parts], axis=-1)


def _offsets(widths):
    ends, total = [], 0
    for width in widths[:-1]:
        total += width
        ends.append(total)
    return ends
