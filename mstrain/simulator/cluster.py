"""Devices and the links between them.

Networks: a switch (every device has one port, full duplex), a torus (a link per neighbour and direction) and
arbitrary pairs (a bandwidth per pair). All answer the same questions: which wires a message uses, how fast it
travels, and what ring a group of devices forms. Bandwidths are bytes/s per direction, latencies seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from mstrain.hardware import Link
from mstrain.hardware.constants import AxisLinks
from mstrain.simulator.collectives import Ring
from mstrain.simulator.placement import Placement

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
    """One end of one direction of a link; `device` is where it is drawn, `name` what it is called there."""

    device: int
    name: str
    bandwidth: float


class Path(NamedTuple):
    """The numbers of the wires a message crosses, the slowest one's bandwidth, and its latency."""

    wires: tuple[int, ...]
    bandwidth: float
    latency: float


class Network(ABC):
    """What all networks share.

    `latency` is seconds per hop, `launch` seconds to start a message or a collective. `both_ways`: rings send
    half of their data each way round.
    """

    both_ways = False
    launch = 0.0

    @abstractmethod
    def wire(self, number: int) -> Wire:
        """The wire called `number`."""

    @abstractmethod
    def path(self, source: int, destination: int) -> Path:
        """The way of a message from `source` to `destination`."""

    def alike(self, placement: Placement) -> bool:
        """Whether all tensor ranks and data replicas of a placed plan see the same links."""
        return False

    def ring(self, members: Sequence[int]) -> Ring:
        """The ring through `members` in order.

        A wire that several hops cross is shared by them, so a ring that closes over a line of torus links
        comes out at half the bandwidth of one that closes around the torus.
        """
        return _ring(self, members)[0]

    def ring_for(self, kind: str, members: Sequence[int]) -> Ring:
        """The ring through `members` as a collective of `kind` sees it."""
        return self.ring(members)

    def ring_wires(self, members: Sequence[int]) -> Sequence[int]:
        """The wires that the ring through `members` occupies."""
        return _ring(self, members)[1]

    def mean_bandwidth(self, members: Sequence[int]) -> float:
        """Mean over the unordered pairs of `members`, as DistIR's collectives see a group."""
        pairs = [self.path(a, b).bandwidth for i, a in enumerate(members) for b in members[i + 1 :]]
        return float(np.mean(pairs))


@lru_cache(maxsize=1 << 14)
def _ring(network: Network, members: Sequence[int]) -> tuple[Ring, tuple[int, ...]]:
    load: dict[int, float] = {}
    latency = 0.0
    for here, there in zip(members, [*members[1:], members[0]]):
        for source, destination in ((here, there), (there, here))[: 1 + network.both_ways]:
            path = network.path(source, destination)
            latency = max(latency, path.latency - network.launch)
            for number in path.wires:
                load[number] = load.get(number, 0.0) + 1.0 / (1 + network.both_ways)
    bandwidth = min(network.wire(number).bandwidth / share for number, share in load.items())
    return Ring(len(members), Link(network.launch, latency, bandwidth)), tuple(load)


@dataclass(frozen=True)
class Switch(Network):
    """One full-duplex port of `bandwidth` per device; wires 2d (out) and 2d + 1 (in) are device d's."""

    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0

    def alike(self, placement: Placement) -> bool:
        return True

    def wire(self, number: int) -> Wire:
        return Wire(number // 2, ("link out", "link in")[number % 2], self.bandwidth)

    def path(self, source: int, destination: int) -> Path:
        return Path((2 * source, 2 * destination + 1), self.bandwidth, self.launch + self.latency)

    def ring(self, members: Sequence[int]) -> Ring:
        return Ring(len(members), Link(self.launch, self.latency, self.bandwidth))

    def ring_wires(self, members: Sequence[int]) -> Sequence[int]:
        return [2 * member + side for member in members for side in (0, 1)]

    def mean_bandwidth(self, members: Sequence[int]) -> float:
        return self.bandwidth


@dataclass(frozen=True)
class Torus(Network):
    """Devices numbered row-major over `shape`; each has a link of `bandwidth` to both neighbours in every
    dim.

    Messages go dim by dim, the shorter way round. `wrap=False` makes a mesh (no links around).
    """

    shape: tuple[int, ...]
    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0
    wrap: bool = True
    both_ways = True

    def alike(self, placement: Placement) -> bool:
        # Shifts along a closed dim map the plan to itself when every parallel axis is one whole dim.
        sizes = [getattr(placement.degrees, axis) for axis in placement.order]
        return (
            self.wrap
            and placement.first == 0
            and [size for size in sizes if size > 1] == [size for size in self.shape if size > 1]
        )

    def _step(self, device: int, dim: int, positive: bool) -> int:
        """The neighbour of `device` along `dim`."""
        stride = prod(self.shape[dim + 1 :])
        at = device // stride % self.shape[dim]
        return device + ((at + (1 if positive else -1)) % self.shape[dim] - at) * stride

    def wire(self, number: int) -> Wire:
        # Two numbers per link and direction: where it leaves a device, and where it arrives at the neighbour.
        number, arrives = divmod(number, 2)
        device, which = divmod(number, 2 * len(self.shape))
        dim, negative = divmod(which, 2)
        if arrives:
            neighbour = self._step(device, dim, not negative)
            return Wire(neighbour, f"link dim {dim} {'-+'[negative]} in", self.bandwidth)
        return Wire(device, f"link dim {dim} {'+-'[negative]} out", self.bandwidth)

    def path(self, source: int, destination: int) -> Path:
        wires, here, hops = [], source, 0
        for dim in reversed(range(len(self.shape))):
            size, stride = self.shape[dim], prod(self.shape[dim + 1 :])
            at, target = source // stride % size, destination // stride % size
            forward = (target - at) % size
            positive = forward <= size - forward if self.wrap else target > at
            for _ in range(forward if positive else (at - target) % size):
                number = 2 * (2 * len(self.shape) * here + 2 * dim + (0 if positive else 1))
                wires += [number, number + 1]
                here, hops = self._step(here, dim, positive), hops + 1
        return Path(tuple(wires), self.bandwidth, self.launch + self.latency * hops)


@dataclass(frozen=True, eq=False)
class Pairs(Network):
    """A symmetric matrix of bandwidths (bytes/s), NaN where two devices have no link; one latency for all.

    This is DistIR's notion of a topology: no pair slows another. Rings go one way only, because a measured
    pair bandwidth is usually that of a port which both directions of a ring would share.
    """

    bandwidths: np.ndarray
    latency: float = 0.0
    launch: float = 0.0

    @classmethod
    def from_triples(
        cls, num_devices: int, triples: Sequence[tuple[int, int, float]], latency: float = 0.0
    ) -> Pairs:
        """From (source, destination, bytes/s) triples, each stored both ways."""
        matrix = np.full((num_devices, num_devices), np.nan)
        for source, destination, bandwidth in triples:
            matrix[source, destination] = matrix[destination, source] = bandwidth
        return cls(matrix, latency)

    def wire(self, number: int) -> Wire:
        pair, arrives = divmod(number, 2)
        source, destination = divmod(pair, len(self.bandwidths))
        bandwidth = float(self.bandwidths[source, destination])
        if arrives:
            return Wire(destination, f"link from {source}", bandwidth)
        return Wire(source, f"link to {destination}", bandwidth)

    def path(self, source: int, destination: int) -> Path:
        bandwidth = float(self.bandwidths[source, destination])
        if np.isnan(bandwidth):
            raise ValueError(
                f"devices {source} and {destination} must talk but have no link; "
                f"add ({source}, {destination}, bytes_per_second) to the topology"
            )
        number = 2 * (source * len(self.bandwidths) + destination)
        return Path((number, number + 1), bandwidth, self.launch + self.latency)

    def mean_bandwidth(self, members: Sequence[int]) -> float:
        inside = self.bandwidths[np.ix_(members, members)][np.triu_indices(len(members), 1)]
        return super().mean_bandwidth(members) if np.isnan(inside).any() else float(inside.mean())


@dataclass(frozen=True)
class Axes(Network):
    """Devices numbered row-major over the axes of a plan, one full-duplex link per device and axis.

    This is the network that the tuner's cost model has in mind: axes do not slow each other, and every
    collective has its own launch. `links` has one entry per axis; messages use the link of the axis along
    which they go.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[AxisLinks, ...]

    def alike(self, placement: Placement) -> bool:
        return True

    def _axis(self, source: int, destination: int) -> int:
        distance = abs(source - destination)
        return next(i for i in range(len(self.sizes)) if distance >= prod(self.sizes[i + 1 :]))

    def _wires(self, device: int, axis: int) -> tuple[int, int]:
        out = 2 * (device * len(self.sizes) + axis)
        return out, out + 1

    def wire(self, number: int) -> Wire:
        rest, inward = divmod(number, 2)
        device, axis = divmod(rest, len(self.sizes))
        bandwidth = self.links[axis].permute.bandwidth
        return Wire(device, f"link {self.names[axis]} {'in' if inward else 'out'}", bandwidth)

    def path(self, source: int, destination: int) -> Path:
        axis = self._axis(source, destination)
        link = self.links[axis].permute
        wires = self._wires(source, axis)[0], self._wires(destination, axis)[1]
        return Path(wires, link.bandwidth, link.launch + link.sync)

    def ring_for(self, kind: str, members: Sequence[int]) -> Ring:
        links = self.links[self._axis(members[0], members[1])]
        return Ring(len(members), links.reduce_scatter if kind == "ReduceScatter" else links.all_gather)

    def ring(self, members: Sequence[int]) -> Ring:
        return self.ring_for("AllGather", members)

    def ring_wires(self, members: Sequence[int]) -> Sequence[int]:
        axis = self._axis(members[0], members[1])
        return [number for member in members for number in self._wires(member, axis)]


@dataclass(frozen=True)
class Cluster:
    """Devices 0..n-1 and the network between them."""

    devices: tuple[Device, ...]
    network: Network

    @classmethod
    def homogeneous(cls, num_devices: int, device: Device, network: Network) -> Cluster:
        """`num_devices` devices of one kind. Raises ValueError when a torus has another size."""
        if isinstance(network, Torus) and int(np.prod(network.shape)) != num_devices:
            raise ValueError(
                f"a torus of shape {network.shape} has {int(np.prod(network.shape))} devices, "
                f"not {num_devices}; give a shape whose product is {num_devices}"
            )
        return cls((device,) * num_devices, network)

    def ranks_alike(self, placement: Placement) -> bool:
        """Whether one rank of one replica can stand for all: same links, same devices per stage."""
        degrees = placement.degrees
        replicas, ranks = np.divmod(np.arange(degrees.data * degrees.tensor), degrees.tensor)

        def one_kind(stage: int) -> bool:
            mine = {
                id(device): device
                for device in map(self.devices.__getitem__, placement.worker(replicas, ranks, stage).tolist())
            }
            return len(set(mine.values())) == 1

        return self.network.alike(placement) and all(one_kind(stage) for stage in range(degrees.pipeline))
