"""Devices and the links between them.

A network gives the wires and the time of a message, and the ring of a group of devices. Bandwidths are bytes/s per
direction, latencies seconds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from mstrain.hardware import Link
from mstrain.hardware.constants import AxisLinks

GIGABIT = 1.25e8  # bytes


@dataclass(frozen=True)
class Device:
    """One accelerator: flop/s, bytes/s to memory, bytes of memory, seconds per kernel launch."""

    flops: float
    memory_bandwidth: float
    memory_bytes: float = float("inf")
    launch_seconds: float = 0.0
    kind: str = "device"


class Wire(NamedTuple):
    """One end of one direction of a link; `device` is where it is drawn, `name` its name there."""

    device: int
    name: str
    bandwidth: float


class Path(NamedTuple):
    """The wires a message crosses, the slowest one's bandwidth, and its latency."""

    wires: tuple[Wire, ...]
    bandwidth: float
    latency: float


class Network(ABC):
    """The links of a cluster; `launch` is the seconds to start a message or a collective."""

    launch = 0.0

    @abstractmethod
    def path(self, source: int, destination: int) -> Path:
        """The path of a message from `source` to `destination`."""

    def hops(self, here: int, there: int) -> Sequence[Path]:
        """The paths over which a ring sends equal parts from one member to the next."""
        return (self.path(here, there),)

    def link(self, kind: str, members: Sequence[int]) -> Link:
        """The link of a collective of `kind` on the ring through `members` in order.

        A wire that several hops cross is shared by them; `sync` is the latency of the slowest hop.
        """
        return self._ring(members)[0]

    def ring_wires(self, members: Sequence[int]) -> Sequence[Wire]:
        """The wires that the ring through `members` occupies."""
        return self._ring(members)[1]

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - networks are few and small
    def _ring(self, members: Sequence[int]) -> tuple[Link, tuple[Wire, ...]]:
        load: dict[Wire, float] = {}
        latency = 0.0
        for here, there in zip(members, [*members[1:], members[0]]):
            paths = self.hops(here, there)
            for path in paths:
                latency = max(latency, path.latency - self.launch)
                for wire in path.wires:
                    load[wire] = load.get(wire, 0.0) + 1.0 / len(paths)
        bandwidth = min(wire.bandwidth / share for wire, share in load.items())
        return Link(self.launch, latency, bandwidth), tuple(load)


@dataclass(frozen=True)
class Switch(Network):
    """One full-duplex port of `bandwidth` per device."""

    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0

    def path(self, source: int, destination: int) -> Path:
        wires = Wire(source, "link out", self.bandwidth), Wire(destination, "link in", self.bandwidth)
        return Path(wires, self.bandwidth, self.launch + self.latency)


@dataclass(frozen=True)
class Axes(Network):
    """Devices numbered row-major over the axes of a plan, one full-duplex link per device and axis.

    The cost of a product assumes this network: axes do not slow each other, and every collective has its own launch.
    `links` has one entry per axis; messages use the link of the axis along which they go. `ring` is the link of
    collectives among the devices of the last two axes together.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[AxisLinks, ...]
    ring: AxisLinks | None = None

    def _axis(self, source: int, destination: int) -> int:
        distance = abs(source - destination)
        return next(i for i in range(len(self.sizes)) if distance >= prod(self.sizes[i + 1 :]))

    def _wire(self, device: int, axis: int, way: str) -> Wire:
        return Wire(device, f"link {self.names[axis]} {way}", self.links[axis].permute.bandwidth)

    def path(self, source: int, destination: int) -> Path:
        axis = self._axis(source, destination)
        link = self.links[axis].permute
        wires = self._wire(source, axis, "out"), self._wire(destination, axis, "in")
        return Path(wires, link.bandwidth, link.launch + link.sync)

    def link(self, kind: str, members: Sequence[int]) -> Link:
        axis = self._axis(members[0], members[1])
        links = self.ring if self.ring and len(members) > self.sizes[axis] else self.links[axis]
        return links.reduce_scatter if kind == "ReduceScatter" else links.all_gather

    def ring_wires(self, members: Sequence[int]) -> Sequence[Wire]:
        axis = self._axis(members[0], members[1])
        return [self._wire(member, axis, way) for member in members for way in ("out", "in")]


@dataclass(frozen=True)
class Cluster:
    """Devices 0..n-1 and the network between them."""

    devices: tuple[Device, ...]
    network: Network

    @classmethod
    def homogeneous(cls, num_devices: int, device: Device, network: Network) -> "Cluster":
        return cls((device,) * num_devices, network)
