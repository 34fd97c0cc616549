"""The order in which a weight's features are stored, and the way back to the canonical order.

Canonical order is the model's own: `W[in, out]`, fused projections as consecutive segments (all queries, then all
keys, then all values). Two things want another order on a mesh of R x C, and both are properties of the parameter:

* A fused projection splits on each column shard, so column shard j stores its part of every segment side by side.
* MeshSlice with S slices wants contiguous slices. Activations keep their features in order over the C columns, so
  slice s is the s-th piece of every column shard, C pieces in all; the row-sharded dim of a weight is stored such
  that the s-th piece of every row shard, R pieces in all, holds the same features in the same order. With R = C the
  two orders are the same, and nothing moves.

Orders are applied by reshapes and transposes, so a sharded array moves by collectives instead of being gathered.
Leading dims (layers stacked by a scan) pass through.
"""

import dataclasses

import jax.numpy as jnp


def _anywhere(x, dim, stored):
    return x


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a parameter whose canonical shape ends in `shape` is stored.

    Attributes:
      shape: canonical trailing shape: (in, out) of a kernel, (out,) of a bias, (vocabulary, features) of a table.
      segments: widths of the fused segments of the last canonical dim; one segment means no reordering.
      columns: column shards C.
      rows: row shards R.
      slices: slice count S of the row-sharded dim (the first stored dim).
      transposed: stored as [out, in] (X-stationary dataflow).
      padding: zeros appended to each canonical dim, so that shards divide a vocabulary of any size.
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
        """Stored as it is: no reordering, no padding."""
        return not (self._is_fused or self._is_slice_major or self.transposed or any(self.padding))

    def from_canonical(self, x, place=_anywhere):
        """Canonical [..., *shape] to stored order.

        `place(x, dim, stored)` may say where x should be now: sharded on its last (-1) or second last (-2) dim
        alone, as the other one is reordered whole and without communication, or (None) on both as a running step
        wants it. `stored` tells whether a transposed kernel is in its stored orientation yet.
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
        """Stored order to canonical [..., *shape]; `place` as in `from_canonical`."""
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
    """[all of segment 1 | all of segment 2 ...] to, or from, [shard 1 of each segment | shard 2 of each ...]."""
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
