"""The order of the tokens in x_TxD, in which every device has whole sequences, or its part of each of its sequences.

The orders are reshapes and transposes, so the compiler communicates tokens and losses by all-to-alls.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class TokenOrder:
    """Sequences in the order of the batch, or split into `context` x `rows` parts (`mstrain.layers.sequence_split`).

    Attributes:
      copies: number of data-parallel replicas, which have different sequences.
      context, rows: devices of a replica along axis `context`, and rows of a grid that split sequences.
      slices, columns: if attention is computed between products with dataflow `rs`: their slice count, and the columns
        over which tokens are sharded outside of attention. Such a product regroups tokens.
    """

    copies: int = 1
    context: int = 1
    rows: int = 1
    slices: int = 1
    columns: int = 1

    @property
    def parts(self) -> int:
        """Parts of every sequence."""
        return self.context * self.rows

    def apply(self, x_BxT):
        """The elements [B * T] of whole sequences, in this order."""
        if self.parts == 1:
            return x_BxT.reshape(-1)
        sequences, seq = x_BxT.shape
        chunks = x_BxT.reshape(self.copies, -1, 2, self.parts, seq // (2 * self.parts))
        pairs = jnp.stack([chunks[:, :, 0], jnp.flip(chunks[:, :, 1], 2)], axis=3)
        by_device = pairs.reshape(self.copies, -1, self.context, self.rows, seq // self.parts).transpose(0, 2, 3, 1, 4)
        return self._regroup(by_device.reshape(-1), self.rows, self.columns)

    def undo(self, x_T, seq: int):
        """The elements in the order of the batch, from those that `apply` returns; further dims stay."""
        if self.parts == 1:
            return x_T
        rest = x_T.shape[1:]
        by_device = self._regroup(x_T, self.columns, self.rows)
        by_device = by_device.reshape(self.copies, self.context, self.rows, -1, seq // self.parts, *rest)
        pairs = jnp.moveaxis(by_device, 3, 1).reshape(self.copies, -1, self.parts, 2, seq // (2 * self.parts), *rest)
        chunks = jnp.stack([pairs[:, :, :, 0], jnp.flip(pairs[:, :, :, 1], 2)], axis=2)
        return chunks.reshape(-1, *rest)

    def _regroup(self, x_T, shards: int, others: int):
        """The order of tokens after a product with dataflow `rs`: slice s of all `shards` becomes slice s of all
        `others`."""
        if self.slices == 1:
            return x_T
        rest = x_T.shape[1:]
        by_slice = jnp.moveaxis(x_T.reshape(self.copies * self.context, shards, self.slices, -1, *rest), 1, 2)
        by_slice = by_slice.reshape(self.copies * self.context, self.slices, others, -1, *rest)
        return jnp.moveaxis(by_slice, 2, 1).reshape(-1, *rest)
