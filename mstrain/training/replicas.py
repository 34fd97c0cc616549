"""Compares checksums of every replicated value across devices.

The same program computes all replicas of a value from the same inputs, so they are bitwise equal. A difference
indicates a defective chip, often before the loss shows it.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.checks import at_least
from mstrain.job.job import Job
from mstrain.program.program import Program
from mstrain.training.stopped import Stopped


@dataclasses.dataclass(frozen=True)
class ReplicasConfig:
    """Comparison of replicated values across devices."""

    every: int | None = None
    """Steps between comparisons of the checksums of all replicas. Null disables them."""

    def __post_init__(self):
        if self.every is not None:
            at_least("check_replicas", self, every=1)


class ReplicaCheck:
    """A hook that raises Stopped, which names the device, when a replica differs."""

    def __init__(self, job: Job):
        self._job, self._checksums = job, None

    def __call__(self, step: int, state) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        arrays = [leaf for _, leaf in leaves]
        if self._checksums is None:
            self._checksums = checksum_program(arrays).compile()
        found = self._all_gather(self._checksums(arrays))
        differing = [
            f"{names[i]} on {_device(device)}"
            for i, array in enumerate(arrays)
            for device in differing_devices(array.sharding.devices_indices_map(array.shape), found, i)
        ]
        if differing:
            more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
            shown = ", ".join(differing[:8]) + more
            raise Stopped(
                f"Stopped after step {step}: replicas that must be equal differ: {shown}. Remove that device's "
                "host from the job and start the same command; if it happens on another host, resume from an "
                "older checkpoint."
            )

    def _all_gather(self, checksums: jax.Array) -> dict[int, np.ndarray]:
        """Device id -> uint32 checksum of every leaf, of all hosts."""
        own = {shard.device.id: np.asarray(shard.data).reshape(-1) for shard in checksums.addressable_shards}
        text = ";".join(f"{device}:{values.tobytes().hex()}" for device, values in own.items())
        rows = (row.split(":") for part in self._job.all_gather("checksums", text) for row in part.split(";"))
        return {int(device): np.frombuffer(bytes.fromhex(values), np.uint32) for device, values in rows}


def checksum_program(arrays: list[jax.Array]) -> Program:
    """From `arrays` to uint32 [devices, leaves]: sums of each device's own part of each leaf."""
    shardings = [array.sharding for array in arrays]
    named = [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
    assert len(named) == len(shardings)
    mesh = named[0].mesh

    def local(*parts):
        return jnp.stack([_checksum(part) for part in parts])[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in named),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return Program("checksums of replicas", lambda arrays: mapped(*arrays), (arrays,))


def differing_devices(indices: dict, checksums: dict[int, np.ndarray], leaf: int) -> list:
    """Devices whose checksum of `leaf` differs from that of most replicas; all devices without a majority."""
    groups = collections.defaultdict(list)
    for device, index in indices.items():
        groups[str(index)].append(device)
    odd = []
    for devices in groups.values():
        counts = collections.Counter(int(checksums[device.id][leaf]) for device in devices)
        (leader, most), *others = counts.most_common(2)
        tied = others and others[0][1] == most
        odd += [device for device in devices if len(counts) > 1 and (tied or int(checksums[device.id][leaf]) != leader)]
    return odd


def _checksum(part):
    """Sum of the bits as uint32, weighted by position, so that swapped values change it."""
    bits = jax.lax.bitcast_convert_type(part, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[part.dtype.itemsize])
    bits = bits.reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _device(device) -> str:
    return f"device {device.id} of process {device.process_index}"
