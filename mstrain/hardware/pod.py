"""The devices of a job: chip, nodes or slices, and the links of mesh axes, which have two levels.

The links within a TPU slice are those of the torus, those within a node of GPUs are NVLink or PCI Express. The network
joins slices or nodes.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mstrain.hardware import Chip, Link, TpuSlice
from mstrain.hardware.calibration import Calibration, load_calibration
from mstrain.hardware.constants import COLLECTIVES, AxisLinks, Constants, constants_for
from mstrain.hardware.efficiency import Efficiency, efficiency_of
from mstrain.hardware.link import NETWORK_HOP
from mstrain.hardware.torus_parts import Part, Parts, torus_parts
from mstrain.mesh import MeshShape


@dataclass(frozen=True)
class Links:
    """The links of the axes of a plan; `replica` is data x context, `ring` is row x col (None if unknown)."""

    stage: AxisLinks
    context: AxisLinks
    replica: AxisLinks
    row: AxisLinks
    col: AxisLinks
    ring: AxisLinks | None


@dataclass(frozen=True)
class Pod:
    """`devices` equal devices in equal nodes or TPU slices.

    Attributes:
      tpu_slice: one TPU slice; None for other devices.
      per_node: number of devices of a GPU node or of a TPU slice; 0 if nodes are unknown.
      node_bandwidth: bytes/s of the network of a node or slice in one direction, shared by its devices.
      measured: measured link and compute constants, which replace those derived from the table of chips.
      calibration: measured rates, which replace those derived; also links, if it has them.
    """

    name: str
    chip: Chip
    devices: int
    tpu_slice: TpuSlice | None = None
    per_node: int = 0
    node_bandwidth: float = math.inf
    measured: Constants | None = None
    calibration: Calibration | None = None

    def calibrated(self, path: str | Path | None, dtype: str) -> "Pod":
        """The pod with the rates of the calibration file `path`; unchanged if `path` is None.

        Raises ValueError for an invalid file, and for one with other devices or another dtype.
        """
        if path is None:
            return self
        calibration = load_calibration(path)
        calibration.check_device(self.chip.device_kinds, path)
        calibration.check_dtype(dtype, path)
        return replace(self, calibration=calibration)

    @property
    def efficiency(self) -> Efficiency:
        return efficiency_of(self.chip)

    @property
    def slices(self) -> int:
        """Number of TPU slices; 1 for other devices."""
        return self.devices // self.tpu_slice.devices if self.tpu_slice else 1

    @property
    def derived(self) -> bool:
        """Whether all rates are derived from the tables of chips and efficiencies, and none is measured."""
        return not (self.measured or self.calibration or self.chip.platform == "cpu")

    def links(self, sizes: tuple[int, ...], dtype: str = "bf16") -> Links:
        """Links of a plan; `sizes` are those of its (stage, data, context, row, col) axes."""
        if self.measured or self.chip.platform == "cpu":
            known = self.measured or constants_for(self.chip, dtype)
            return Links(known.row, known.row, known.row, known.row, known.col, known.ring)
        return _links(self, sizes)

    def along(self, axis: str, outer: int) -> AxisLinks | None:
        """The measured links of mesh axis `axis` where it is on `outer` nodes or slices; None if they are derived.

        What was measured within a node or slice says nothing about links between them.
        """
        known = self.calibration
        if known is None or not known.links or (outer > 1 and known.devices <= self.per_node):
            return None
        return known.along(axis)

    def links_over(self, axes: tuple[int, ...]) -> AxisLinks:
        """Links of a collective over the torus axes `axes` of a slice, given by their numbers."""
        whole = self.tpu_slice.physical_axes if self.tpu_slice else ()
        return _local(self, tuple(Part(axis, whole[axis], 1) for axis in axes), 1)

    def constants(self, sizes: tuple[int, ...], dtype: str) -> Constants:
        """Rates and tensor-parallel links of a plan; `sizes` are those of its (stage, data, context, row, col) axes.

        Raises ValueError if a number is unknown.
        """
        if self.measured or self.chip.platform == "cpu":
            known = self.measured or constants_for(self.chip, dtype)
            return self.calibration.constants(known) if self.calibration else known
        known = self._rates(_links(self, sizes), dtype)
        if not self.calibration:
            return known
        return replace(self.calibration.constants(known), row=known.row, col=known.col, ring=known.ring)

    def tuning_constants(self, sizes: tuple[int, ...], dtype: str) -> Constants | None:
        """The constants by which train.py chooses dataflows and slice counts, without calibration.

        None if it chooses by rule: on emulated CPU devices, and if a rate is unknown.
        """
        if self.measured or self.chip.platform == "cpu":
            return self.measured
        try:
            return replace(self, calibration=None).constants(sizes, dtype)
        except ValueError:
            return None

    def _rates(self, links: Links, dtype: str) -> Constants:
        chip, peak = self.chip, self.chip.peak(dtype)
        if peak is None:
            known = " or ".join(name for name in ("bf16", "f32") if chip.peak(name))
            raise ValueError(f"{chip.name} has no {dtype} peak in the table of chips. Type dtype={known}.")
        rate = peak * self.efficiency.matmul
        source = "table of chips and efficiencies"
        return Constants(
            self.name, source, rate, links.row, links.col, chip.overlap, chip.hbm_bandwidth, True, ring=links.ring
        )

    def memory_bandwidth(self, constants: Constants) -> float:
        """Bytes/s of long contiguous reads and writes in the memory of one device."""
        bandwidth = constants.hbm_bandwidth or self.chip.hbm_bandwidth or math.inf
        return bandwidth * self.efficiency.memory if self.derived else bandwidth

    def elementwise_bandwidth(self, constants: Constants, native: bool) -> float:
        """Bytes/s of element-wise work; `native`: whether the program is that of train.py."""
        bandwidth = self.memory_bandwidth(constants)
        return bandwidth * self.efficiency.elementwise if native and self.derived else bandwidth

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory of one device; infinite if the table of chips has no value."""
        return self.chip.hbm_bytes or math.inf

    def meshes(self, outside: int, stages: int = 1) -> tuple[tuple[int, int], ...]:
        """The (rows, cols) grids of the tensor-parallel devices of a plan with `outside` data x context replicas.

        On a torus and with one stage, rows and cols each consist of whole axes of one slice, or are a part of one axis.
        """
        tensor = self.devices // outside // stages
        if self.tpu_slice is None or stages > 1:
            return () if self.tpu_slice and self.tpu_slice.devices % tensor else factorizations(tensor)
        if outside % self.slices:
            return ()
        shapes, one = factorizations(tensor), self.tpu_slice.one
        return tuple(s for s in shapes if _laid(one.physical_axes, (1, outside // self.slices, 1, *s)))

    def network_bandwidth(self) -> float:
        """Bytes/s in one direction of the network of a node, divided by its number of devices."""
        return self.node_bandwidth * self.efficiency.network / max(1, self.per_node)


def factorizations(devices: int) -> tuple[tuple[int, int], ...]:
    """All (rows, cols) with rows * cols == devices, including 1 x N and N x 1."""
    return tuple((r, devices // r) for r in range(1, devices + 1) if devices % r == 0)


@lru_cache(maxsize=4096)
def _links(pod: Pod, sizes: tuple[int, ...]) -> Links:
    """Links that the pod's calibration has, and those derived from the table of chips.

    If every tensor-parallel axis within a slice consists of whole torus axes, or is a part of one, its collectives use
    all links of these torus axes. Otherwise, and if stages split a torus axis, some rings are open lines, and all axes
    have one link. Neighbors along the last axis are neighboring devices.
    """
    stage, data, context, rows, cols = sizes
    tensor = rows * cols
    inside = _inside(pod, sizes)
    owned = _laid(pod.tpu_slice.physical_axes, inside) if pod.tpu_slice and inside else None

    def links(
        first: int, size: int, stride: int, last: int | None = None, share: int = 1, axis: str = "row"
    ) -> AxisLinks:
        inner, outer = node_group(pod.per_node, size, stride)
        if measured := pod.along(axis, outer):
            return measured
        mine = owned[first : (last or first) + 1] if owned else ()
        local = _local(pod, _joined(mine), share)
        return _two_levels(pod, local, inner, outer) if pod.per_node else local

    share = 2 if rows > 1 and cols > 1 else 1  # both tensor-parallel axes use the links of a GPU at the same time
    if pod.along("row", node_group(pod.per_node, tensor, 1)[1]):
        ring = None  # no ring over both axes is measured
    else:
        ring = links(3, tensor, 1, 4) if owned or pod.chip.platform == "gpu" else _winding_ring(pod, tensor)
    return Links(
        links(0, stage, tensor * context * data), links(2, context, tensor), links(1, data * context, tensor, 2),
        links(3, rows, cols, share=share), links(4, cols, 1, share=share, axis="col"), ring,
    )  # fmt: skip


def _laid(physical: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Parts, ...] | None:
    """Torus parts of the axes (stage, data, context, row, col); None if the planner cannot derive their links."""
    parts = torus_parts(physical, sizes) or ()
    whole = [all(part.size == physical[part.axis] for part in axis) for axis in parts]
    known = sizes[0] == 1 and all(full or len(axis) == 1 for full, axis in zip(whole[3:], parts[3:]))
    return parts if parts and (all(whole) or known) else None


def _joined(axes: tuple[Parts, ...]) -> Parts:
    """The torus parts of several neighboring mesh axes, merged."""
    found: dict[int, Part] = {}
    for part in itertools.chain(*axes):
        old = found.get(part.axis, Part(part.axis, 1, part.stride))
        found[part.axis] = Part(part.axis, old.size * part.size, min(old.stride, part.stride))
    return tuple(found[axis] for axis in sorted(found))


def _winding_ring(pod: Pod, tensor: int) -> AxisLinks | None:
    """A bidirectional ring through all devices of a slice, which XLA uses if axes are parts of torus axes, or None."""
    if pod.tpu_slice is None or tensor != pod.tpu_slice.devices or len(pod.tpu_slice.physical_axes) < 2:
        return None
    one = constants_for(pod.chip).row
    each = (one.all_gather, one.reduce_scatter, one.permute)
    return AxisLinks(*(replace(link, bandwidth=2 * link.bandwidth) for link in each))


def _inside(pod: Pod, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The `sizes` of the axes within one slice: data, then stages, span the slices. None if they do not divide."""
    across = math.gcd(sizes[1], pod.slices)
    if sizes[0] % (pod.slices // across):
        return None
    return (sizes[0] * across // pod.slices, sizes[1] // across, *sizes[2:])


def node_group(per_node: int, size: int, stride: int) -> tuple[int, int]:
    """(inner, outer): of the `size` devices of an axis, `stride` apart, `inner` share a node, on `outer` nodes."""
    inner = math.gcd(size, max(1, per_node // stride)) if per_node else size
    return inner, size // inner


def _local(pod: Pod, parts: Parts, share: int) -> AxisLinks:
    """Links of a collective within a node, divided among `share` axes, or over `parts` of the torus of a slice."""
    chip = pod.chip
    if chip.platform != "gpu":
        one = constants_for(chip).row
        torus = pod.tpu_slice
        if not (torus and parts):
            return one
        whole = math.prod(part.size for part in parts) - 1

        def along(name: str) -> Link:
            link, (count, steps) = getattr(one, name), torus.ring(parts, name)
            return Link(link.launch, link.sync * steps / whole, link.bandwidth * count)

        return AxisLinks(*map(along, COLLECTIVES))
    bandwidth = float(chip.ici_links or 1) * (chip.ici_bandwidth or math.inf) * pod.efficiency.link / share
    names = ("launch_all_gather", "launch_reduce_scatter", "launch_permute")
    return AxisLinks(*(Link(getattr(chip, name) or 0.0, chip.sync or 0.0, bandwidth) for name in names))


def _two_levels(pod: Pod, local: AxisLinks, inner: int, outer: int) -> AxisLinks:
    """Links with which one ring takes as long as collectives on two levels: within nodes, and between nodes.

    Each of the `inner` devices of a node sends its part over the network to `outer` nodes. The latency between nodes is
    that of a tree, which large sums over many nodes use.
    """
    size, network = inner * outer, pod.network_bandwidth()
    if outer == 1:
        return local

    def both(link: Link) -> Link:
        hops = (inner - 1) * link.sync + math.ceil(math.log2(outer)) * NETWORK_HOP
        inverse = (inner - 1) / inner / link.bandwidth + (outer - 1) / outer / inner / network
        return Link(link.launch, hops / (size - 1), (size - 1) / size / inverse)

    return AxisLinks(
        both(local.all_gather), both(local.reduce_scatter), Link(local.permute.launch, NETWORK_HOP, network)
    )


def pod_of(machine: Chip | TpuSlice, devices: int) -> Pod:
    """The pod of a `TpuSlice`, or of `devices` devices of one chip.

    GPUs are in the nodes of the table of chips if they fill several, else in one node. Raises ValueError if the
    bandwidth between several slices is unknown.
    """
    if isinstance(machine, TpuSlice):
        one, network = machine.one, machine.network if machine.count > 1 else math.inf
        return Pod(machine.name, machine.chip, machine.devices, one, one.devices, network)
    name, usual = f"{devices} x {machine.name}", machine.node_devices or 8
    if machine.platform == "gpu" and devices > usual and devices % usual == 0 and machine.node_bandwidth:
        return Pod(name, machine, devices, None, usual, machine.node_bandwidth)
    return Pod(name, machine, devices, None, devices if machine.platform == "gpu" else 0)


def tuning_constants(machine: Chip | TpuSlice | None, shape: MeshShape, dtype: str = "bf16") -> Constants | None:
    """`Pod.tuning_constants` of a mesh of train.py on a TPU slice (or several), or on devices of one chip."""
    if machine is None:
        return None
    sizes = (shape.stage, shape.data, shape.context, shape.row, shape.col)
    return pod_of(machine, shape.devices).tuning_constants(sizes, dtype)
