"""The places of a mesh's devices on the torus, and the links that their messages use.

Every link has two independent directions. A `Lane` is one direction of all links along one torus dim; dims are numbered
as in the topology, and the cores of a chip are one more, last dim.
"""

import collections
import dataclasses
import functools

import numpy as np

from mstrain.hardware import Link

Lane = tuple[int, int]  # (dim, +1 or -1)
DIM_NAMES = "xyz"
NETWORK: Lane = (-1, 1)  # a device's share of its slice's network


@dataclasses.dataclass(frozen=True, eq=False)
class Torus:
    """Devices on a torus of chips.

    Attributes:
      sizes: chips along each dim, then the devices of a chip.
      closed: whether each dim is a ring; an open line otherwise.
      places: int array of shape (devices, dims), the place of every device in the order of the mesh; in its own slice
        where there are several.
      network: the link of one device to those of other slices; None for one slice.
    """

    sizes: tuple[int, ...]
    closed: tuple[bool, ...]
    places: np.ndarray
    network: Link | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Every direction of every dim that has a link, and the network."""
        links = tuple((dim, way) for dim, size in enumerate(self.sizes) if size > 1 for way in (1, -1))
        return (*links, NETWORK) if self.network else links

    def lane_name(self, lane: Lane) -> str:
        """`x+`, `y-`, or `core+` for the devices of one chip."""
        dim, way = lane
        if lane == NETWORK:
            return "network"
        name = "core" if dim == len(self.sizes) - 1 else DIM_NAMES[dim]
        return name + ("+" if way > 0 else "-")

    @functools.lru_cache(maxsize=1024)  # noqa: B019  the pairs of a program repeat for every message of a ring
    def route(self, pairs: tuple[tuple[int, int], ...]) -> tuple[dict[Lane, int], int]:
        """Messages over the busiest link of each lane in use, and the hops of the longest way.

        A message takes one dim after the other, the shorter way round a ring, and the only way along an open line.
        """
        load, longest = collections.Counter(), 0
        for source, target in pairs:
            links = self._way(source, target)
            load.update(links)
            longest = max(longest, len(links))
        busiest: dict[Lane, int] = {}
        for (lane, *_), number in load.items():
            busiest[lane] = max(number, busiest.get(lane, 0))
        return busiest, longest

    def _way(self, source: int, target: int) -> list[tuple]:
        """The links from one device to another: (lane, place of the chip it leaves)."""
        at, links = self.places[source].tolist(), []
        for dim, goal in enumerate(self.places[target].tolist()):
            shift, size = goal - at[dim], self.sizes[dim]
            if self.closed[dim]:
                shift %= size
                shift -= size if 2 * shift > size else 0
            way = 1 if shift > 0 else -1
            for _ in range(abs(shift)):
                links.append(((dim, way), *at[:-1]))
                at[dim] = (at[dim] + way) % size
        return links

    def rings(self, group: list[int]) -> "Rings":
        """The rings on which a collective among `group` runs when its data is split over all links it has.

        Both directions of a closed dim carry a share each; an open line carries one, because the device at its end
        receives everything over one link. Data over several dims is divided among the orders of the dims, so that the
        links of all dims are in use, and a path is as long as the dims together ("How to Scale Your Model", sharding).
        """
        block = self._block(group)
        links = sum(2 if block.closed[dim] else 1 for dim in block.chips)
        return Rings(links / block.sharing, sum(size - 1 for size in block.sizes.values()), block.lanes)

    def one_ring(self, group: list[int]) -> "Rings":
        """One ring in both directions through all of `group`, device by device.

        A block of two dims or more holds a ring of neighbors. On an open line the messages that close the ring use the
        links of the other direction.
        """
        block = self._block(group)
        closed = len(block.chips) > 1 or block.closed[block.chips[0]]
        return Rings((2 if closed else 1) / block.sharing, len(group) - 1, block.lanes)

    def sharing(self, group: list[int]) -> int:
        """Groups like `group` on its links: those of other cores of its chips, and of the chips in between."""
        return self._block(group).sharing

    def _block(self, group: list[int]) -> "_Block":
        along = [np.unique(column) for column in self.places[group].T]
        sizes = {dim: len(values) for dim, values in enumerate(along) if len(values) > 1}
        chips = [dim for dim in sizes if dim < len(self.sizes) - 1] or list(sizes)
        strides = {dim: int(np.diff(along[dim]).min()) for dim in chips}
        closed = {dim: self.closed[dim] and strides[dim] * sizes[dim] == self.sizes[dim] for dim in chips}
        # Devices in between, and those of the same chip that are in other groups, use the same links.
        sharing = max(strides.values()) * (self.sizes[-1] if len(along[-1]) == 1 else 1)
        return _Block(sizes, chips, closed, sharing)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Devices of a group along the dims it spreads over: sizes, dims of chips, which are closed, groups on a link."""

    sizes: dict[int, int]
    chips: list[int]
    closed: dict[int, bool]
    sharing: int

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple((dim, way) for dim in self.chips for way in (1, -1))


@dataclasses.dataclass(frozen=True)
class Rings:
    """How a collective runs: the links one way whose bandwidth it has, its steps, the lanes it occupies."""

    links: float
    steps: int
    lanes: tuple[Lane, ...]
