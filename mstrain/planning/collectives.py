"""What a collective costs on a ring: the one place for the formula."""

from __future__ import annotations

from typing import NamedTuple


class Ring(NamedTuple):
    """A group of devices as its collectives see it.

    Attributes:
      size: participants.
      bandwidth: bytes/s at which a participant passes data on, after sharing links within the ring.
      latency: seconds for the slowest step between neighbours.
    """

    size: int
    bandwidth: float
    latency: float


def collective_seconds(kind: str, nbytes: float, ring: Ring) -> float:
    """Seconds of a bandwidth-optimal ring collective (Patarasuk and Yuan, 2009, for all-reduce).

    `nbytes` is what one participant holds before the operation: the whole tensor for AllReduce, ReduceScatter and
    Reduce, its shard for AllGather and Gather; for Broadcast and Scatter, what the source holds.
    Raises ValueError for a kind that is not a collective.
    """
    steps = ring.size - 1
    per_byte = 1.0 / ring.bandwidth
    if kind == "AllReduce":
        return 2 * steps * (ring.latency + nbytes / ring.size * per_byte)
    if kind in ("ReduceScatter", "Scatter"):
        return steps * (ring.latency + nbytes / ring.size * per_byte)
    if kind in ("AllGather", "Gather"):
        return steps * (ring.latency + nbytes * per_byte)
    if kind in ("Broadcast", "Reduce"):
        return steps * ring.latency + nbytes * per_byte
    raise ValueError(f"{kind!r} is not a collective; known: AllReduce ReduceScatter AllGather Gather Scatter "
                     "Broadcast Reduce")
