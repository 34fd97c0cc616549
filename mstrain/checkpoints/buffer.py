"""How many bytes a host sets aside to read a checkpoint, beside the arrays themselves.

Files hold chunks of at most CHUNK bytes. A shard is read from all chunks that it touches, and Orbax refuses a shard
that needs more than the whole buffer: so the buffer holds the largest one, and otherwise at most SHARE of the state.
"""

import math

import jax

CHUNK = 2**26  # bytes
SHARE, MOST = 0.1, 2**29  # of the state's bytes on this host; bytes


def buffer_for(saved_parameters, target) -> int:
    """Bytes to read `target` (abstract, sharded arrays) of a checkpoint with these parameters (Orbax's metadata).

    Moments have the shapes and shardings of parameters.
    """
    pairs = zip(jax.tree.leaves(target["params"]), jax.tree.leaves(saved_parameters), strict=True)
    largest = max(_bytes_touched(leaf, saved.storage and saved.storage.chunk_shape) for leaf, saved in pairs)
    return max(largest + 1, min(int(SHARE * _held(target)), MOST))


def _bytes_touched(leaf: jax.ShapeDtypeStruct, chunk: tuple[int, ...] | None) -> int:
    """Bytes of all chunks that the largest shard of a device here touches; of the whole array if it has no chunks."""
    chunk = chunk or leaf.shape
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return max(leaf.dtype.itemsize * math.prod(map(_reach, index, leaf.shape, chunk)) for index in indices)


def _reach(part: slice, size: int, chunk: int) -> int:
    start, stop, _ = part.indices(size)
    return (-(-stop // chunk) - start // chunk) * chunk


def _held(target) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)
        for leaf in jax.tree.leaves(target)
    )
