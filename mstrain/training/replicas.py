"""Do copies still agree: checksums of every replicated value on every device that holds one.

Replicas of a value are made by the same program from the same bits, so they are equal to the last bit; a
difference is the first sign of a defective chip, long before the loss shows it.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mstrain.checks import at_least
from mstrain.job.job import Job
from mstrain.training.stopped import Stopped


@dataclasses.dataclass(frozen=True)
class ReplicasConfig:
    """Do replicated values still agree?"""

    every: int | None = None
    """Steps between comparisons of the checksums of all copies of a value; null compares never."""

    def __post_init__(self):
        if self.every is not None:
            at_least("check_replicas", self, every=1)


class ReplicaCheck:
    """Called as a hook; raises Stopped that names the device whose copy differs."""

    def __init__(self, job: Job):
        self._job, self._checksums = job, None

    def __call__(self, step: int, state) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        arrays = [leaf for _, leaf in leaves]
        if self._checksums is None:
            self._checksums = compile_checksums(arrays)
        found = self._gather(self._checksums(arrays))
        differing = [
            f"{names[i]} on {_device(device)}"
            for i, array in enumerate(arrays)
            for device in odd_ones_out(array.sharding.devices_indices_map(array.shape), found, i)
        ]
        if differing:
            more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
            shown = ", ".join(differing[:8]) + more
            raise Stopped(
                f"Stopped after step {step}: copies that should be equal differ: {shown}. Take that device's "
                "host out of the job and start the same command; if it repeats elsewhere, resume from an "
                "older checkpoint."
            )

    def _gather(self, checksums: jax.Array) -> dict[int, np.ndarray]:
        """Device id -> uint32 checksum of every leaf, of all hosts."""
        own = {shard.device.id: np.asarray(shard.data).reshape(-1) for shard in checksums.addressable_shards}
        text = ";".join(f"{device}:{values.tobytes().hex()}" for device, values in own.items())
        rows = (row.split(":") for part in self._job.gather("checksums", text) for row in part.split(";"))
        return {int(device): np.frombuffer(bytes.fromhex(values), np.uint32) for device, values in rows}


def compile_checksums(arrays: list[jax.Array]):
    """A function from `arrays` to uint32 [devices, leaves]: sums of each device's own part of each leaf."""
    mesh = arrays[0].sharding.mesh

    def local(*parts):
        return jnp.stack([_checksum(part) for part in parts])[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(a.sharding.spec for a in arrays),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(lambda arrays: mapped(*arrays))


def odd_ones_out(indices: dict, checksums: dict[int, np.ndarray], leaf: int) -> list:
    """Devices whose checksum of `leaf` is not that of most devices of its index; all when no value leads."""
    groups = collections.defaultdict(list)
    for device, index in indices.items():
        groups[str(index)].append(device)
    odd = []
    for devices in groups.values():
        counts = collections.Counter(int(checksums[device.id][leaf]) for device in devices)
        (leader, most), *others = counts.most_common(2)
        tied = others and others[0][1] == most
        odd += [
            device
            for device in devices
            if len(counts) > 1 and (tied or int(checksums[device.id][leaf]) != leader)
        ]
    return odd


def _checksum(part):
    """Sum of the bits as uint32, each weighted by its place, so that exchanged values show, too."""
    bits = jax.lax.bitcast_convert_type(
        part, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[part.dtype.itemsize]
    )
    bits = bits.reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _device(device) -> str:
    return f"device {device.id} of process {device.process_index}"
