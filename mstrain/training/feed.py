"""Batches on their way to the devices: each process reads only the rows its own devices need."""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.data import Batches


class Feed:
    """Gives `batch_AxBxT1` (int32: A microbatches of B sequences of T + 1 tokens) for any step from 0 on."""

    def __init__(self, batches: Batches, mesh: Mesh, accumulate: int):
        self.batches = batches
        microbatch = batches.batch_size // accumulate
        self.shape = (accumulate, microbatch, batches.seq + 1)
        self.sharding = NamedSharding(mesh, P(None, _axes_that_divide(microbatch, mesh)))
        self._numbers = np.arange(math.prod(self.shape[:2])).reshape(self.shape[:2])

    def __call__(self, step: int) -> jax.Array:
        parts = {}  # devices along `col` want the same rows, and JAX asks for each device anew

        def read(index):
            rows = self._numbers[index[:2]]
            key = (rows.shape, rows.flat[0])
            if key not in parts:
                parts[key] = self.batches.batch(step, rows.reshape(-1)).reshape(*rows.shape, -1)
            return parts[key]

        return jax.make_array_from_callback(self.shape, self.sharding, read)

    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, np.int32, sharding=self.sharding)


def _axes_that_divide(sequences: int, mesh: Mesh) -> tuple[str, ...]:
    axes = []
    for axis in ("data", "row"):
        if sequences % math.prod(mesh.shape[a] for a in (*axes, axis)) == 0:
            axes.append(axis)
    return tuple(axes)
