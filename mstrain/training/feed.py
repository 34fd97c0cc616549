"""Loads batches onto devices. Each process reads only the rows that its own devices need."""

import jax
import numpy as np
from jax.sharding import Mesh

from mstrain.data import AnyBatches, Batch
from mstrain.program.step import abstract_batch


class Feed:
    """Returns the Batch (tokens [A, B, T + 1]: A microbatches of B sequences) of any step from 0 on."""

    def __init__(self, batches: AnyBatches, mesh: Mesh, accumulate: int):
        self.batches = batches
        self.abstract = abstract_batch(mesh, batches.batch_size, batches.seq, accumulate, batches.parts)
        self._numbers = np.arange(batches.batch_size).reshape(accumulate, -1)

    def __call__(self, step: int) -> Batch:
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
