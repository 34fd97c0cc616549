"""Writes the shards of a state as files of one host, and restores arrays from them and from replicas on other hosts.

A shard is named by its leaf and the range of the array that it holds, so data-parallel replicas of a shard have the
same name on every host. Arrays are treated as unsigned integers of the same width, which preserves every bit.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def shard_name(leaf: int, shape: tuple[int, ...], index: tuple[slice, ...]) -> str:
    """File name of the part `index` of leaf number `leaf`."""
    ranges = ["-".join(map(str, part.indices(size)[:2])) for part, size in zip(index, shape, strict=True)]
    return ".".join([str(leaf), *ranges, "bin"])


def local_indices(leaf: jax.ShapeDtypeStruct) -> dict[Any, tuple[slice, ...]]:
    """The part of an abstract, sharded array on each device of this process."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return {device: index for device, index in indices.items() if index is not None}


def names_of(process: int, leaves: list[jax.ShapeDtypeStruct]) -> set[str]:
    """The shards that the devices of `process` hold of abstract, sharded arrays."""
    return {
        shard_name(i, leaf.shape, index)
        for i, leaf in enumerate(leaves)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
        if device.process_index == process
    }


def to_host(leaves: list[jax.Array]) -> dict[str, np.ndarray]:
    """A copy in host memory of every shard on this process's devices, once per shard."""
    shards = {
        shard_name(i, leaf.shape, shard.index): shard.data
        for i, leaf in enumerate(leaves)
        for shard in leaf.addressable_shards
    }
    for data in shards.values():
        data.copy_to_host_async()
    on_cpu = jax.local_devices()[0].platform == "cpu"  # where a NumPy view would be the device's own memory
    return {name: np.array(data, copy=True) if on_cpu else np.asarray(data) for name, data in shards.items()}


def choose_sources(leaf: jax.ShapeDtypeStruct, having: set[int]) -> set[Any] | None:
    """One device of a process in `having` for every part of the array; None when some part has none."""
    chosen = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        if device.process_index in having:
            chosen.setdefault(shard_name(0, leaf.shape, index), device)
    parts = {shard_name(0, leaf.shape, index) for index in leaf.sharding.devices_indices_map(leaf.shape).values()}
    return set(chosen.values()) if len(chosen) == len(parts) else None


def from_files(folder: Path, number: int, leaf: jax.ShapeDtypeStruct, having: set[int] | None) -> jax.Array:
    """Leaf `number`, sharded as `leaf` is, from this process's files in `folder`.

    `having` are the processes that have all their files and send copies to the others; None when all have. All
    processes call this together.
    """
    bits = BITS[leaf.dtype.itemsize]
    sources = choose_sources(leaf, having) if having is not None else None
    local_shape = leaf.sharding.shard_shape(leaf.shape)
    parts = []
    for device, index in local_indices(leaf).items():
        if sources is None or device in sources:
            part = np.fromfile(folder / shard_name(number, leaf.shape, index), bits).reshape(local_shape)
        else:
            part = np.zeros(local_shape, bits)
        parts.append(jax.device_put(part if sources is None else part[None], device))
    if sources is None:
        whole = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        return _same_bits(leaf.dtype, leaf.sharding)(whole)
    spread = _with_copies(leaf)
    copies = jax.make_array_from_single_device_arrays((_copies(leaf), *leaf.shape), spread, parts)
    return _sum_of_copies(leaf.dtype, leaf.sharding)(copies)


def _copy_axes(leaf: jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """Mesh axes along which devices hold the same part."""
    used = {name for axes in leaf.sharding.spec for name in ((axes,) if isinstance(axes, str) else axes or ())}
    return tuple(name for name in leaf.sharding.mesh.axis_names if name not in used)


def _copies(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod([leaf.sharding.mesh.shape[name] for name in _copy_axes(leaf)]))


def _with_copies(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Of an array with a new first dim, one entry for each copy."""
    return NamedSharding(leaf.sharding.mesh, P(_copy_axes(leaf) or None, *leaf.sharding.spec))


@functools.lru_cache(maxsize=256)
def _same_bits(dtype, sharding: NamedSharding):
    return jax.jit(lambda bits: _from_bits(bits, dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _sum_of_copies(dtype, sharding: NamedSharding):
    """Adds copies of which all but one are zero: every device gets the bits of that one."""

    def add(copies):
        return _from_bits(jnp.sum(copies, axis=0, dtype=copies.dtype), dtype)

    return jax.jit(add, out_shardings=sharding)


def _from_bits(bits, dtype):
    return bits != 0 if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, dtype)
