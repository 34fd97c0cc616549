"""Networks of tests: a torus with single links, and links of arbitrary pairs. They check the rings of `Network`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mstrain.simulator.cluster import Network, Path, Wire


@dataclass(frozen=True)
class Torus(Network):
    """Devices numbered row-major over `shape`; each has a link of `bandwidth` to both neighbors in every dim.

    Messages are routed dim by dim, in the shorter direction. `wrap=False` makes a mesh without wraparound links.
    """

    shape: tuple[int, ...]
    bandwidth: float
    latency: float = 0.0
    launch: float = 0.0
    wrap: bool = True

    def hops(self, here: int, there: int) -> tuple[Path, Path]:
        return self.path(here, there), self.path(there, here)  # half of the data of a ring in each direction

    def _step(self, device: int, dim: int, positive: bool) -> int:
        """The neighbor of `device` along `dim`."""
        stride = prod(self.shape[dim + 1 :])
        at = device // stride % self.shape[dim]
        return device + ((at + (1 if positive else -1)) % self.shape[dim] - at) * stride

    def path(self, source: int, destination: int) -> Path:
        wires, here, hops = [], source, 0
        for dim in reversed(range(len(self.shape))):
            size, stride = self.shape[dim], prod(self.shape[dim + 1 :])
            at, target = source // stride % size, destination // stride % size
            forward = (target - at) % size
            positive = forward <= size - forward if self.wrap else target > at
            for _ in range(forward if positive else (at - target) % size):
                leaving, arriving = "+-" if positive else "-+"
                wires.append(Wire(here, f"link dim {dim} {leaving} out", self.bandwidth))
                here, hops = self._step(here, dim, positive), hops + 1
                wires.append(Wire(here, f"link dim {dim} {arriving} in", self.bandwidth))
        return Path(tuple(wires), self.bandwidth, self.launch + self.latency * hops)


@dataclass(frozen=True, eq=False)
class Pairs(Network):
    """A symmetric matrix of bandwidths (bytes/s), NaN where two devices have no link; one latency for all.

    This is the topology of DistIR: pairs do not slow each other. Rings have one direction only, because the measured
    bandwidth of a pair is usually that of a port, which both directions of a ring would share.
    """

    bandwidths: np.ndarray
    latency: float = 0.0
    launch: float = 0.0

    @classmethod
    def from_triples(cls, num_devices: int, triples: Sequence[tuple[int, int, float]], latency: float = 0.0) -> Pairs:
        """From (source, destination, bytes/s) triples, each stored both ways."""
        matrix = np.full((num_devices, num_devices), np.nan)
        for source, destination, bandwidth in triples:
            matrix[source, destination] = matrix[destination, source] = bandwidth
        return cls(matrix, latency)

    def path(self, source: int, destination: int) -> Path:
        bandwidth = float(self.bandwidths[source, destination])
        if np.isnan(bandwidth):
            raise ValueError(
                f"devices {source} and {destination} communicate but have no link; "
                f"add ({source}, {destination}, bytes_per_second) to the topology"
            )
        wires = Wire(source, f"link to {destination}", bandwidth), Wire(destination, f"link from {source}", bandwidth)
        return Path(wires, bandwidth, self.launch + self.latency)
