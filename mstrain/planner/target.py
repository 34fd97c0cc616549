"""The pod: which chip, how many devices, and what their links give to the axes of a plan."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from mstrain.hardware import Chip, TpuSlice
from mstrain.hardware.calibration import Calibration
from mstrain.hardware.constants import AxisLinks, Constants, constants_for
from mstrain.hardware.efficiency import efficiency_of
from mstrain.parallel.tune import factorizations
from mstrain.planner.clusters import find_fabric
from mstrain.planner.stated.fabric import Fabric
from mstrain.simulator.cluster import Device


@dataclass(frozen=True)
class Pod:
    """`devices` equal devices.

    Attributes:
      tpu_slice: the TPU torus; None for other devices.
      fabric: the two levels of links of GPU nodes, or of several TPU slices; None for one slice.
      measured: link and compute constants of these devices, instead of those derived from the table of chips.
      calibration: measured rates of these devices, instead of those derived; links where it has them.
    """

    name: str
    chip: Chip
    devices: int
    tpu_slice: TpuSlice | None = None
    measured: Constants | None = None
    fabric: Fabric | None = None
    calibration: Calibration | None = None

    def constants(self, sizes: tuple[int, ...], dtype: str) -> Constants:
        """The constants for a plan whose axes have `sizes`.

        Rings use both directions of a torus axis only where every axis of the plan is made of whole torus
        axes; otherwise some rings are lines, and all are given one link.
        """
        if self.fabric is not None and self.measured is None:
            known = _fabric_constants(self, sizes, dtype)
        else:
            known = self.measured or _constants(self, tuple(size for size in sizes if size > 1), dtype)
        return self.calibration.constants(known) if self.calibration else known

    def outer_links(self, sizes: tuple[int, ...], dtype: str) -> tuple[AxisLinks, AxisLinks]:
        """The links of the (pipeline, data) axes of a plan of (pipeline, data, rows, cols) `sizes`."""
        if self.measured or self.fabric is None:
            links = self.constants(sizes, dtype).row
            return links, links
        pipeline, data, *_ = fabric_links(self.fabric, sizes)
        return pipeline, data

    def device(self, constants: Constants) -> Device:
        """One device, at the rate of its GEMMs."""
        bandwidth = constants.hbm_bandwidth or self.chip.hbm_bandwidth or math.inf
        if constants.shaped:
            bandwidth *= efficiency_of(self.chip).memory
        return Device(constants.flops, bandwidth, self.memory_bytes, kind=self.chip.name)

    @property
    def memory_bytes(self) -> float:
        """Of one device; infinite where the table of chips does not say."""
        return self.chip.hbm_bytes or math.inf

    def meshes(self, data: int, pipeline: int = 1) -> tuple[tuple[int, int], ...]:
        """The (rows, cols) of the tensor devices of a plan: on a torus, of whole torus axes, inside one slice."""
        if self.tpu_slice is None or pipeline > 1:
            tensor = self.devices // data // pipeline
            outside = self.tpu_slice is not None and self.tpu_slice.devices % tensor
            return () if outside else factorizations(tensor)
        slices = self.devices // self.tpu_slice.devices
        try:
            return self.tpu_slice.mesh_shapes(data // slices) if data % slices == 0 else ()
        except ValueError:
            return ()


@lru_cache(maxsize=4096)
def _fabric_constants(pod: Pod, sizes: tuple[int, ...], dtype: str) -> Constants:
    """Constants of devices with two levels of links; the tensor axes lie inside nodes or slices as far as they fit."""
    chip, fabric = pod.chip, pod.fabric
    assert fabric is not None
    sizes = (1,) * (4 - len(sizes)) + tuple(sizes)
    if pod.tpu_slice is not None:
        slices = pod.devices // pod.tpu_slice.devices
        inside = (math.prod(sizes[:2]) // slices, *sizes[2:])
        whole = whole_axes(pod.tpu_slice.physical_axes, tuple(size for size in inside if size > 1))
        return constants_for(pod.tpu_slice if whole else chip, dtype)
    peak = chip.peak(dtype)
    if peak is None:
        known = " or ".join(name for name in ("bf16", "f32") if chip.peak(name))
        raise ValueError(f"{chip.name} has no {dtype} peak in the table of chips. Type dtype={known}.")
    *_, row, col = fabric_links(fabric, sizes)
    efficiency = efficiency_of(chip)
    source = f"table of chips and efficiencies: {fabric.per_node} devices a node"
    return Constants(pod.name, source, peak * efficiency.matmul, row, col, chip.overlap, chip.hbm_bandwidth, True)


@lru_cache(maxsize=4096)
def fabric_links(fabric: Fabric, sizes: tuple[int, ...]) -> tuple[AxisLinks, ...]:
    """The links of the (pipeline, data, row, col) axes of `sizes`, of which the last are neighbors."""
    _, data, rows, cols = sizes
    strides = (data * rows * cols, rows * cols, cols, 1)
    share = 2 if rows > 1 and cols > 1 else 1  # both tensor axes use a device's links at once
    return tuple(
        fabric.axis_links(size, stride, share if axis > 1 else 1)
        for axis, (size, stride) in enumerate(zip(sizes, strides))
    )


@lru_cache(maxsize=4096)
def _constants(pod: Pod, sizes: tuple[int, ...], dtype: str) -> Constants:
    if pod.tpu_slice is not None and whole_axes(pod.tpu_slice.physical_axes, sizes):
        return constants_for(pod.tpu_slice, dtype)
    return constants_for(pod.chip, dtype)


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
    fabric = find_fabric(cluster)
    single = fabric.tpu_slice is not None and fabric.devices == fabric.tpu_slice.devices
    pod = Pod(cluster, fabric.chip, fabric.devices, fabric.tpu_slice, fabric=None if single else fabric)
    missing = [name for name in ("hbm_bytes", "hbm_bandwidth") if getattr(pod.chip, name) is None]
    if missing:
        raise ValueError(f"cluster={cluster}: the table of chips has no {' or '.join(missing)} for {pod.chip.name}.")
    pod.constants((), dtype)  # says which other number is missing
    return pod
