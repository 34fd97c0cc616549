"""Copies of the weights: how tensors are sharded over them, and how their gradients are summed.

Copies are the devices along `replica`, `data` and `expert`, which have different sequences, and along `context`, which
have different parts of the same sequences. Weights of experts have no copies along `expert`, which shards their dim of
experts.
"""

import math

from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mstrain.gemm.local import all_gather, all_reduce, axis_size, reduce_scatter

REPLICA = "replica"
DATA, EXPERT = "data", "expert"
SHARED = (DATA, EXPERT, "context")  # mesh axes of the copies of one TPU slice, over which tensors may be sharded
COPIES = (REPLICA, *SHARED)


def axes_of(entry) -> tuple[str, ...]:
    """The mesh axes of one dim of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def copies_of(spec: P, copies: tuple[str, ...] = COPIES) -> tuple[str, ...]:
    """Those of the axes `copies` along which a weight sharded as `spec` has copies."""
    return tuple(axis for axis in copies if axis != EXPERT or all(axes_of(entry) != (EXPERT,) for entry in spec))


def shared_axes(spec: P) -> tuple[str, ...]:
    """Those of the axes `SHARED` along which a weight sharded as `spec` has copies, or over which it is sharded."""
    return copies_of(spec, SHARED)


def shard_over_data(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, first: int = 0) -> P:
    """`spec` with its `shared_axes` appended to the first dim, from `first` on, that they divide; else `spec`."""
    entries = list(spec)
    for dim in range(first, len(shape)):
        axes = (*axes_of(entries[dim]), *shared_axes(spec))
        if shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            entries[dim] = axes
            return P(*entries)
    return spec


def gathered_spec(spec: P) -> P:
    """`spec` without what `shard_over_data` appends."""

    def whole(entry):
        axes = axes_of(entry)
        return tuple(axis for axis in axes if axis not in SHARED) or None if DATA in axes else entry

    return P(*map(whole, spec))


def data_dim(spec: P) -> int | None:
    """The dim to which `shard_over_data` appends; None if it found none."""
    return next((dim for dim, entry in enumerate(spec) if DATA in axes_of(entry)), None)


def sum_copies(gradient, spec: P, copies: tuple[str, ...] = COPIES):
    """The sum of the copies' `gradient` in `jax.shard_map`, a shard of it if `spec` has a `data_dim`.

    `copies` are those of the mesh's axes.

    Over several TPU slices, only shards of the sums within a slice are communicated between slices.
    """
    dim, shared = data_dim(spec), shared_axes(spec)
    if dim is not None:
        shard = all_reduce(reduce_scatter(gradient, shared, dim), (REPLICA,))
        # libtpu 0.0.42 fuses a cast of the sum into the SparseCore's reduce_scatter, and then does not compile it.
        return lax.optimization_barrier(shard)
    if copies == COPIES and axis_size((REPLICA,)) > 1:
        divides = [dim for dim, size in enumerate(gradient.shape) if size % axis_size(shared) == 0]
        if divides:
            shard = all_reduce(reduce_scatter(gradient, shared, divides[0]), (REPLICA,))
            return all_gather(shard, shared, divides[0])
    return all_reduce(gradient, copies_of(spec, copies))
