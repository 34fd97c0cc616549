"""Data-parallel copies: how tensors are sharded over them, and how their gradients are summed."""

import math

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm.local import all_reduce, reduce_scatter

AXIS = "data"
COPIES = (AXIS,)  # mesh axes of all copies


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
    """The sum of the copies' `gradient` in `jax.shard_map`: a reduce_scatter if `spec` shards it over `data`."""
    dim = data_dim(spec)
    return all_reduce(gradient, COPIES) if dim is None else reduce_scatter(gradient, (AXIS,), dim)
