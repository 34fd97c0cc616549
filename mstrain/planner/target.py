"""The pod: which chip, how many devices, and what their links give to the axes of a plan."""

import itertools
import math
import re
from dataclasses import dataclass
from functools import lru_cache

from mstrain.hardware import Chip, TpuSlice, all_chips, parse_target
from mstrain.hardware.constants import Constants, constants_for
from mstrain.parallel.tune import factorisations
from mstrain.simulator.cluster import Device

NVLINK_DEVICES = 8  # in the servers whose NVLink the table of chips describes


@dataclass(frozen=True)
class Pod:
    """`devices` equal devices.

    Attributes:
      tpu_slice: the TPU torus; None for other devices.
      measured: link and compute constants of these devices, instead of those derived from the table of chips.
    """

    name: str
    chip: Chip
    devices: int
    tpu_slice: TpuSlice | None = None
    measured: Constants | None = None

    def constants(self, sizes: tuple[int, ...], dtype: str) -> Constants:
        """The constants for a plan whose axes have `sizes`.

        Rings use both directions of a torus axis only where every axis of the plan is made of whole torus
        axes; otherwise some rings are lines, and all are given one link.
        """
        return self.measured or _constants(self, tuple(size for size in sizes if size > 1), dtype)

    def device(self, constants: Constants) -> Device:
        """One device, at the rate of its GEMMs."""
        return Device(constants.flops, self.chip.hbm_bandwidth or math.inf, self.memory_bytes, kind=self.chip.name)

    @property
    def memory_bytes(self) -> float:
        """Of one device; infinite where the table of chips does not say."""
        return self.chip.hbm_bytes or math.inf

    def meshes(self, data: int) -> tuple[tuple[int, int], ...]:
        """The (rows, cols) that the devices of one of `data` replicas may form: on a torus, of whole torus axes."""
        if self.tpu_slice is None:
            return factorisations(self.devices // data)
        try:
            return self.tpu_slice.mesh_shapes(data)
        except ValueError:
            return ()


@lru_cache(maxsize=4096)
def _constants(pod: Pod, sizes: tuple[int, ...], dtype: str) -> Constants:
    whole = pod.tpu_slice is not None and whole_axes(pod.tpu_slice.physical_axes, sizes)
    return constants_for(pod.tpu_slice if whole else pod.chip, dtype)


def whole_axes(physical: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether the axes of a plan are products of disjoint physical axes that together are all of them."""
    for owners in itertools.product(range(len(sizes)), repeat=len(physical)):
        made = [math.prod(n for n, owner in zip(physical, owners) if owner == i) for i in range(len(sizes))]
        if made == list(sizes):
            return True
    return False


def pod_of(machine: Chip | TpuSlice, devices: int) -> Pod:
    """The pod that a slice is, or `devices` of one chip."""
    if isinstance(machine, TpuSlice):
        return Pod(machine.name, machine.chip, machine.devices, machine)
    return Pod(f"{devices} x {machine.name}", machine, devices)


def find_pod(cluster: str, dtype: str = "bf16") -> Pod:
    """The pod called `cluster`; raises ValueError with a name that exists, or the number that the table lacks."""
    gpus = {name: chip for name, chip in all_chips().items() if chip.platform == "gpu"}
    match = re.fullmatch(r"([\w-]+):(\d+)", cluster)
    if match and match[1] in gpus:
        chip, count = gpus[match[1]], int(match[2])
        if not 1 <= count <= NVLINK_DEVICES:
            raise ValueError(
                f"cluster={cluster}: the table of chips knows the NVLink of one server of {NVLINK_DEVICES}. "
                f"Type cluster={match[1]}:{NVLINK_DEVICES}, or describe the network to planner=optimal "
                "(hostfile=...)."
            )
        pod = Pod(cluster, chip, count)
    else:
        try:
            found = parse_target(cluster)
        except ValueError as error:
            raise ValueError(f"cluster={cluster}: {error}. GPUs: {' | '.join(gpus)}, then :N, as in h200:8.") from None
        pod = Pod(cluster, found.chip, found.devices, found)
    missing = [name for name in ("hbm_bytes", "hbm_bandwidth") if getattr(pod.chip, name) is None]
    if missing:
        raise ValueError(f"cluster={cluster}: the table of chips has no {' or '.join(missing)} for {pod.chip.name}.")
    pod.constants((), dtype)  # says which other number is missing
    return pod
