"""Two levels of links: those inside a node or TPU slice, and the network between them."""

import math
from dataclasses import dataclass

from mstrain.hardware import Chip, Link, TpuSlice
from mstrain.hardware.constants import AxisLinks
from mstrain.hardware.efficiency import Efficiency, efficiency_of

NETWORK_HOP = 10e-6  # seconds of a message between nodes: NCCL tuning constants, ring, Simple: 14 us; TPU hosts alike


@dataclass(frozen=True)
class Group:
    """Devices of one mesh axis: `inner` of them share a node, on each of `outer` nodes."""

    inner: int
    outer: int

    @property
    def size(self) -> int:
        return self.inner * self.outer


@dataclass(frozen=True)
class Fabric:
    """Equal devices in equal nodes.

    Attributes:
      per_node: devices of a node; of a TPU, of a slice.
      node_bandwidth: bytes/s of a node's network, one way, shared by its devices.
      tpu_slice: the torus inside a TPU slice; None for GPUs.
    """

    name: str
    chip: Chip
    devices: int
    per_node: int
    node_bandwidth: float = math.inf
    tpu_slice: TpuSlice | None = None

    @property
    def efficiency(self) -> Efficiency:
        return efficiency_of(self.chip)

    def group(self, size: int, stride: int) -> Group:
        """The devices of an axis of `size`, of which neighbors are `stride` devices apart."""
        inner = math.gcd(size, max(1, self.per_node // stride))
        return Group(inner, size // inner)

    def inner_bandwidth(self, size: int) -> float:
        """Bytes/s, one way, of each of `size` devices that communicate inside a node."""
        chip = self.chip
        links = float(chip.ici_links or 1)
        if self.tpu_slice is not None:
            assert chip.tpu_slices is not None
            per_chip = chip.tpu_slices.devices_per_chip
            axes, covered = 0, math.gcd(size, per_chip)
            links = float(covered)  # the cores of a chip add up locally, then share its links
            for length in sorted(self.tpu_slice.topology, reverse=True):
                if covered < size and length > 1:
                    axes, covered = axes + 1, covered * length
            links *= max(1, axes) * (2 if self.tpu_slice.wraps else 1)
        return links * (chip.ici_bandwidth or math.inf) * self.efficiency.link

    def outer_bandwidth(self) -> float:
        """Bytes/s, one way, of one device's share of its node's network."""
        return self.node_bandwidth * self.efficiency.network / self.per_node

    def scatter_seconds(self, nbytes: float, group: Group) -> float:
        """A reduce-scatter of `nbytes` held by every device, or the all-gather that ends with them.

        Inside nodes first, so that the network sees one part for each device of a node.
        """
        if group.size == 1:
            return 0.0
        seconds = self.chip.launch_all_gather or 0.0
        if group.inner > 1:
            seconds += (group.inner - 1) * (self.chip.sync or 0.0)
            seconds += nbytes * (group.inner - 1) / group.inner / self.inner_bandwidth(group.inner)
        if group.outer > 1:  # latency of a tree: large sums of many nodes use one
            seconds += math.ceil(math.log2(group.outer)) * NETWORK_HOP
            seconds += nbytes / group.inner * (group.outer - 1) / group.outer / self.outer_bandwidth()
        return seconds

    def sum_seconds(self, nbytes: float, group: Group) -> float:
        """An all-reduce of `nbytes` held by every device."""
        return 2 * self.scatter_seconds(nbytes, group)

    def axis_links(self, size: int, stride: int, share: int = 1) -> AxisLinks:
        """Links with which a ring of `size` costs what its two levels do; `share` axes use the inner links at once."""
        group, chip = self.group(size, stride), self.chip
        inner, outer = self.inner_bandwidth(max(2, group.inner)) / share, self.outer_bandwidth()
        hops = (group.inner - 1) * (chip.sync or 0.0) + math.ceil(math.log2(group.outer)) * NETWORK_HOP
        inverse = (group.inner - 1) / group.inner / inner
        if group.outer > 1:
            inverse += (group.outer - 1) / group.outer / group.inner / outer
        ring = (hops / (size - 1), (size - 1) / size / inverse) if size > 1 else (0.0, inner)
        launches = (chip.launch_all_gather or 0.0, chip.launch_reduce_scatter or 0.0)
        crossing = (NETWORK_HOP, outer) if group.outer > 1 else (chip.sync or 0.0, inner)
        return AxisLinks(
            Link(launches[0], *ring), Link(launches[1], *ring), Link(chip.launch_permute or 0.0, *crossing)
        )

    def message_seconds(self, nbytes: float, stride: int) -> float:
        """A message of `nbytes` to the device `stride` further on."""
        if stride < self.per_node:
            return (self.chip.launch_permute or 0.0) + nbytes / self.inner_bandwidth(2)
        return NETWORK_HOP + nbytes / self.outer_bandwidth()
