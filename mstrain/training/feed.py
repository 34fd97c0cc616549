"""Loads batches onto devices. Each process reads only the rows that its own devices need."""

import math

import jax
import numpy as np
from jax.sharding import Mesh

from mstrain.data import Batches
from mstrain.program.step import abstract_batch


class Feed:
    """Returns `batch_AxBxT1` (int32: A microbatches of B sequences of T + 1 tokens) for any step from 0 on."""

    def __init__(self, batches: Batches, mesh: Mesh, accumulate: int):
        self.batches = batches
        batch = abstract_batch(mesh, batches.batch_size, batches.seq, accumulate)
        self.shape, self.sharding = batch.shape, batch.sharding
        self._numbers = np.arange(math.prod(self.shape[:2])).reshape(self.shape[:2])

    def __call__(self, step: int) -> jax.Array:
        parts = {}  # devices along `col` share rows, but JAX calls `read` for each device

        def read(index):
            rows = self._numbers[index[:2]]
            key = (rows.shape, rows.flat[0])
            if key not in parts:
                parts[key] = self.batches.batch(step, rows.reshape(-1)).reshape(*rows.shape, -1)
            return parts[key]

        return jax.make_array_from_callback(self.shape, self.sharding, read)
