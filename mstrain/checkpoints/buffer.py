"""Size of the host buffer for reading a checkpoint, beside the arrays themselves.

Files consist of chunks of at most CHUNK bytes. A shard is read from all chunks that it overlaps, and Orbax rejects a
shard that needs more than the whole buffer. So the buffer holds the largest shard, and otherwise at most SHARE of the
state.
"""

import math

import jax

from mstrain.checkpoints.shards import local_indices

CHUNK = 2**26  # bytes
SHARE, MOST = 0.1, 2**29  # of the state's bytes on this host; bytes


def buffer_for(saved_parameters, target) -> int:
    """Bytes to read `target` (abstract, sharded arrays) of a checkpoint with these parameters (Orbax's metadata).

    Moments have the shapes and shardings of parameters.
    """
    pairs = zip(jax.tree.leaves(target["params"]), jax.tree.leaves(saved_parameters), strict=True)
    largest = max(_bytes_read(leaf, saved.storage and saved.storage.chunk_shape) for leaf, saved in pairs)
    return max(largest + 1, min(int(SHARE * _local_bytes(target)), MOST))


def _bytes_read(leaf: jax.ShapeDtypeStruct, chunk: tuple[int, ...] | None) -> int:
    """Bytes of all chunks that the largest local shard overlaps; of the whole array if it has no chunks."""
    chunks = chunk or leaf.shape
    indices = local_indices(leaf).values()
    return max(leaf.dtype.itemsize * math.prod(map(_covered, index, leaf.shape, chunks)) for index in indices)


def _covered(part: slice, size: int, chunk: int) -> int:
    start, stop, _ = part.indices(size)
    return (-(-stop // chunk) - start // chunk) * chunk


def _local_bytes(target) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)
        for leaf in jax.tree.leaves(target)
    )
