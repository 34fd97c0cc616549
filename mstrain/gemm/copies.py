"""Data-parallel copies: how tensors are sharded over them, and how their gradients are summed."""

import math

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm.local import all_gather, all_reduce, axis_size, reduce_scatter

AXIS, REPLICA = "data", "replica"
COPIES = (REPLICA, AXIS)  # mesh axes of all copies; tensors are sharded over `data` only


def axes_of(entry) -> tuple[str, ...]:
    """The mesh axes of one dim of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def shard_over_data(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, first: int = 0) -> P:
    """`spec` with axis `data` appended to the first dim, from `first` on, whose shards divide by it; else `spec`."""
    entries = list(spec)
    for dim in range(first, len(shape)):
        axes = (*axes_of(entries[dim]), AXIS)
        if shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            entries[dim] = axes
            return P(*entries)
    return spec


def gathered_spec(spec: P) -> P:
    """`spec` without axis `data`."""
    return P(*(tuple(axis for axis in axes_of(entry) if axis != AXIS) or None for entry in spec))


def data_dim(spec: P) -> int | None:
    """The dim that `spec` shards over axis `data`; None if there is none."""
    return next((dim for dim, entry in enumerate(spec) if AXIS in axes_of(entry)), None)


def sum_copies(gradient, spec: P):
    """The sum of the copies' `gradient` in `jax.shard_map`, a shard of it if `spec` has axis `data`.

    Over several TPU slices, only shards of the sums over `data` are communicated between slices.
    """
    dim = data_dim(spec)
    if dim is not None:
        return all_reduce(reduce_scatter(gradient, (AXIS,), dim), (REPLICA,))
    if axis_size((REPLICA,)) > 1:
        divides = [dim for dim, size in enumerate(gradient.shape) if size % axis_size((AXIS,)) == 0]
        if divides:
            shard = all_reduce(reduce_scatter(gradient, (AXIS,), divides[0]), (REPLICA,))
            return all_gather(shard, (AXIS,), divides[0])
    return all_reduce(gradient, COPIES)
