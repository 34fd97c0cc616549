"""Loads batches onto devices. Each process reads only the rows that its own devices need."""

from typing import Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from mstrain.data import AnyBatches, Batch
from mstrain.program.step import abstract_batch

Batches = TypeVar("Batches", bound=AnyBatches)


class Feed(Generic[Batches]):
    """Returns the Batch (tokens [A, B, T + 1]: A microbatches of B sequences) of any step from 0 on."""

    def __init__(self, batches: Batches, mesh: Mesh, accumulate: int):
        self.batches = batches
        self.abstract = abstract_batch(mesh, batches.batch_size, batches.seq, accumulate, batches.parts)
        self._numbers = np.arange(batches.batch_size).reshape(accumulate, -1)

    def place(self, tokens, vocab_size: int) -> Batch:
        """A batch of one's own: integers [batch, seq + 1] below `vocab_size`.

        Raises ValueError for other shapes, dtypes and ids, and where batches are packed.
        """
        abstract = self.abstract.tokens
        tokens = np.asarray(tokens)
        wanted = (self._numbers.size, abstract.shape[-1])
        if tokens.shape != wanted:
            raise ValueError(f"tokens {tokens.shape} are not batch x (seq + 1) = {wanted}: type batch= and seq=.")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens are {tokens.dtype} and not integers. Type tokens.astype('int32').")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"tokens {tokens.min()} to {tokens.max()} are not within a vocabulary of {vocab_size}.")
        if self.abstract != Batch(abstract):
            raise ValueError("pack= gives batches segments and masks. Type pack=concat for tokens alone.")
        return Batch(jax.device_put(tokens.astype(abstract.dtype).reshape(abstract.shape), abstract.sharding))

    def __call__(self, step: int) -> Batch:
        if step < 0:
            raise ValueError(f"feed({step}): batches are numbered from 0.")
        parts = {}  # devices along `col` share rows, and JAX calls `read` for each device and array

        def read(name, index):
            rows = self._numbers[index[:2]]
            key = (rows.shape, rows.flat[0])
            if key not in parts:
                parts[key] = self.batches.batch(step, rows.reshape(-1))
            return getattr(parts[key], name).reshape(*rows.shape, -1)

        return Batch(*(
            part and jax.make_array_from_callback(part.shape, part.sharding, lambda index, name=name: read(name, index))
            for name, part in zip(Batch._fields, self.abstract, strict=True)
        ))  # fmt: skip
