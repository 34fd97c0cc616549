"""Devices, and the network that connects them.

A `Network` gives the path of a message between two devices and the link of a collective on a ring of devices.
Bandwidths are in bytes/s per direction, latencies in seconds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from mstrain.hardware import Link
from mstrain.hardware.constants import AxisLinks

GIGABIT = 1.25e8  # bytes in 10^9 bits


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
      flops: FLOP/s.
      memory_bandwidth: bytes/s of device memory.
      memory_bytes: capacity of device memory.
      launch_seconds: time to launch a kernel.
      kind: name in messages and traces, followed by the device number.
    """

    flops: float
    memory_bandwidth: float
    memory_bytes: float = float("inf")
    launch_seconds: float = 0.0
    kind: str = "device"


class Wire(NamedTuple):
    """One direction of a link, at one of the two devices it connects.

    A link between two devices has a wire at its sender and another one at its receiver.

    Attributes:
      device: the device with this end of the link.
      name: name of the lane in the timeline of that device, such as "link out".
      bandwidth: bytes/s.
    """

    device: int
    name: str
    bandwidth: float


class Path(NamedTuple):
    """The wires that a message crosses, the bandwidth of the slowest one (bytes/s), and the latency (seconds)."""

    wires: tuple[Wire, ...]
    bandwidth: float
    latency: float


class Network(ABC):
    """The links of a cluster; `launch` is the time in seconds to start a message or a collective."""

    launch = 0.0

    @abstractmethod
    def path(self, source: int, destination: int) -> Path:
        """The path of a message from `source` to `destination`."""

    def hops(self, here: int, there: int) -> Sequence[Path]:
        """The paths between two consecutive members of a ring, over which their data is divided equally."""
        return (self.path(here, there),)

    def link(self, kind: str, members: Sequence[int]) -> Link:
        """The link of a collective of `kind` on the ring of `members`, in this order.

        Hops that cross the same wire divide its bandwidth. `sync` is the latency of the slowest hop.
        """
        return self._ring(members)[0]

    def ring_wires(self, members: Sequence[int]) -> Sequence[Wire]:
        """The wires that a collective on the ring of `members` occupies."""
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
        bandwidth = min(wire.bandwidth / hops for wire, hops in load.items())
        return Link(self.launch, latency, bandwidth), tuple(load)


@dataclass(frozen=True)
class Switch(Network):
    """A switch to which every device has one full-duplex port of `bandwidth` bytes/s."""

    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0

    def path(self, source: int, destination: int) -> Path:
        wires = Wire(source, "link out", self.bandwidth), Wire(destination, "link in", self.bandwidth)
        return Path(wires, self.bandwidth, self.launch + self.latency)


@dataclass(frozen=True)
class Axes(Network):
    """Devices numbered row-major over the axes of a plan, with one full-duplex link per device and axis.

    The cost model of products assumes this network: communication along one axis does not slow communication along
    another one, and every collective has its own launch.

    Attributes:
      names, sizes, links: one entry per axis. A message uses the link of the axis along which it is sent.
      ring: link of collectives over the devices of the last two axes together.
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
    """Devices 0 to n - 1 and the network that connects them."""

    devices: tuple[Device, ...]
    network: Network

    @classmethod
    def homogeneous(cls, num_devices: int, device: Device, network: Network) -> "Cluster":
        return cls((device,) * num_devices, network)
