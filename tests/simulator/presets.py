"""Clusters of chips of the hardware table."""

from __future__ import annotations

from math import prod

from mstrain.hardware import Chip, TpuSlice, chip_named, parse_target
from mstrain.simulator.cluster import Cluster, Device, Switch
from tests.simulator.networks import Torus


def _known(chip: Chip, **numbers: float | None) -> list[float]:
    missing = [name for name, number in numbers.items() if number is None]
    if missing:
        raise ValueError(f"the table of chips has no {' or '.join(missing)} for {chip.name}; choose another chip")
    return list(numbers.values())


def _device(chip: Chip, dtype: str) -> Device:
    flops, bandwidth, memory = _known(
        chip, peak=chip.peak(dtype), hbm_bandwidth=chip.hbm_bandwidth, hbm_bytes=chip.hbm_bytes
    )
    return Device(flops, bandwidth, memory, kind=chip.name)


def slice_cluster(target: str | TpuSlice, dtype: str = "bf16") -> Cluster:
    """A pod slice such as "v4-64": a torus (a mesh where the slice does not close) of the chip's links.

    Messages and collectives pay the chip's launch of a permutation and a sync per hop. Raises ValueError for
    an unknown slice, a number that the table lacks, or chips that hold two devices, which share their links.
    """
    chosen = parse_target(target) if isinstance(target, str) else target
    chip = chosen.chip
    if chosen.devices != prod(chosen.topology):
        raise ValueError(
            f"two devices share each {chip.name} chip and its links, which the simulator cannot "
            "express; choose a generation with one device per chip, such as v4, v5e, v5p or v6e"
        )
    bandwidth, launch, sync = _known(
        chip, ici_bandwidth=chip.ici_bandwidth, launch_permute=chip.launch_permute, sync=chip.sync
    )
    network = Torus(tuple(chosen.topology), bandwidth, sync, launch, wrap=chosen.wraps)
    return Cluster.homogeneous(chosen.devices, _device(chip, dtype), network)


def switch_cluster(chip: str, num_devices: int, bandwidth: float, latency: float = 0.0, dtype: str = "bf16") -> Cluster:
    """`num_devices` chips behind one switch with ports of `bandwidth` bytes/s and `latency` seconds.

    Raises ValueError for an unknown chip or a number that the table lacks.
    """
    return Cluster.homogeneous(num_devices, _device(chip_named(chip), dtype), Switch(bandwidth, latency))
