"""The pod: which chip, how many devices, and what their links give to the axes of a plan."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache

from mstrain.hardware import Chip, Link, TpuSlice
from mstrain.hardware.calibration import Calibration
from mstrain.hardware.constants import GEMM_FRACTION, AxisLinks, Constants, constants_for
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

        `sizes` are those of (pipeline, data, rows, cols). Where every one is made of whole torus axes, its collectives
        use all links of those; otherwise some rings are lines, and all are given one link.
        """
        if self.fabric is not None and self.measured is None:
            known = _fabric_constants(self, sizes, dtype)
        else:
            known = self.measured or _torus_constants(self.chip, self.tpu_slice, sizes, dtype)[0]
        return self.calibration.constants(known) if self.calibration else known

    def outer_links(self, sizes: tuple[int, ...], dtype: str) -> tuple[AxisLinks, AxisLinks]:
        """The links of the (pipeline, data) axes of a plan of (pipeline, data, rows, cols) `sizes`."""
        if self.measured or self.calibration:
            links = self.constants(sizes, dtype).row
            return links, links
        if self.fabric is None:
            pipeline, data = _torus_constants(self.chip, self.tpu_slice, sizes, dtype)[1]
        else:
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
        return _torus_constants(chip, pod.tpu_slice, inside, dtype)[0]
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
def _torus_constants(
    chip: Chip, tpu_slice: TpuSlice | None, sizes: tuple[int, ...], dtype: str
) -> tuple[Constants, tuple[AxisLinks, ...]]:
    """Constants of the last two axes, the tensor axes, and the links of the others."""
    alone = constants_for(chip, dtype)
    owned = torus_axes(tpu_slice.physical_axes, sizes) if tpu_slice and sizes else None
    if tpu_slice is None or owned is None:
        return alone, (alone.row,) * len(sizes[:-2])
    rows, cols = owned[-2:]
    *outer, row, col, ring = (_torus_links(tpu_slice, alone.row, axes) for axes in (*owned, rows + cols))
    source = f"derived from the table of chips: all links of the torus axes, {GEMM_FRACTION:.3f} of the peak"
    return replace(alone, name=tpu_slice.name, source=source, row=row, col=col, ring=ring), tuple(outer)


def _torus_links(tpu_slice: TpuSlice, one: AxisLinks, axes: tuple[int, ...]) -> AxisLinks:
    """Links of a collective over physical axes, from those of one link."""
    if not axes:
        return one
    links, steps = tpu_slice.ring(axes)
    way = steps / (math.prod(tpu_slice.physical_axes[axis] for axis in axes) - 1)
    several = (
        Link(link.launch, link.sync * way, link.bandwidth * links)
        for link in (one.all_gather, one.reduce_scatter, one.permute)
    )
    return AxisLinks(*several)


def torus_axes(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The numbers of the physical axes that each axis of a plan is the product of; None where that takes a part of one.

    Together they are all physical axes.
    """
    for owners in itertools.product(range(len(sizes)), repeat=len(physical)):
        made = tuple(tuple(n for n, owner in enumerate(owners) if owner == axis) for axis in range(len(sizes)))
        if all(math.prod(physical[n] for n in axes) == size for axes, size in zip(made, sizes)):
            return made
    return None


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
