"""Copies of the weights: how tensors are sharded over them, and how their gradients are summed.

Copies are the devices along `replica` and `data`, which have different sequences, and along `context`, which have
different parts of the same sequences.
"""

import math

from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm.local import all_gather, all_reduce, axis_size, reduce_scatter

REPLICA = "replica"
SHARED = ("data", "context")  # mesh axes of the copies of one TPU slice, over which tensors may be sharded
COPIES = (REPLICA, *SHARED)


def axes_of(entry) -> tuple[str, ...]:
    """The mesh axes of one dim of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def shard_over_data(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, first: int = 0) -> P:
    """`spec` with the axes `SHARED` appended to the first dim, from `first` on, that they divide; else `spec`."""
    entries = list(spec)
    for dim in range(first, len(shape)):
        axes = (*axes_of(entries[dim]), *SHARED)
        if shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            entries[dim] = axes
            return P(*entries)
    return spec


def gathered_spec(spec: P) -> P:
    """`spec` without the axes `SHARED`."""
    return P(*(tuple(axis for axis in axes_of(entry) if axis not in SHARED) or None for entry in spec))


def data_dim(spec: P) -> int | None:
    """The dim that `spec` shards over the axes `SHARED`; None if no dim is."""
    return next((dim for dim, entry in enumerate(spec) if set(SHARED) & set(axes_of(entry))), None)


def sum_copies(gradient, spec: P, copies: tuple[str, ...] = COPIES):
    """The sum of the copies' `gradient` in `jax.shard_map`, a shard of it if `spec` has the axes `SHARED`.

    `copies` are those of the mesh's axes.

    Over several TPU slices, only shards of the sums within a slice are communicated between slices.
    """
    dim = data_dim(spec)
    if dim is not None:
        shard = all_reduce(reduce_scatter(gradient, SHARED, dim), (REPLICA,))
        # libtpu 0.0.42 fuses a cast of the sum into the SparseCore's reduce_scatter, and then does not compile it.
        return lax.optimization_barrier(shard)
    if copies == COPIES and axis_size((REPLICA,)) > 1:
        divides = [dim for dim, size in enumerate(gradient.shape) if size % axis_size(SHARED) == 0]
        if divides:
            shard = all_reduce(reduce_scatter(gradient, SHARED, divides[0]), (REPLICA,))
            return all_gather(shard, SHARED, divides[0])
    return all_reduce(gradient, copies)
