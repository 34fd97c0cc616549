"""What a collective costs on a ring of devices, from the link formula that the tuner uses too."""

from __future__ import annotations

from typing import NamedTuple

from mstrain.hardware import Link, collective_seconds


class Ring(NamedTuple):
    """A group of `size` devices as its collectives see it.

    `link`: bytes/s at which a participant passes data on, after sharing links within the ring; `sync` is the
    latency of the slowest step between neighbours, `launch` what starting a collective costs.
    """

    size: int
    link: Link


def ring_seconds(kind: str, nbytes: float, ring: Ring) -> float:
    """Seconds of a bandwidth-optimal ring collective (Patarasuk and Yuan, 2009, for all-reduce).

    `nbytes` is what one participant holds before the operation: the whole tensor for AllReduce, ReduceScatter
    and Reduce, its shard for AllGather and Gather; for Broadcast and Scatter, what the source holds.
    Raises ValueError for a kind that is not a collective.
    """
    size, link = ring
    if kind in ("ReduceScatter", "Scatter"):
        return collective_seconds(link, nbytes / size, size)
    if kind in ("AllGather", "Gather"):
        return collective_seconds(link, nbytes, size)
    if kind == "AllReduce":  # a reduce-scatter and an all-gather, launched together
        return 2 * collective_seconds(link, nbytes / size, size) - (link.launch if size > 1 else 0.0)
    if kind in ("Broadcast", "Reduce"):  # in many small pieces, one behind the other
        return link.launch + (size - 1) * link.sync + nbytes / link.bandwidth if size > 1 else 0.0
    raise ValueError(
        f"{kind!r} is not a collective; known: AllReduce ReduceScatter AllGather Gather Scatter "
        "Broadcast Reduce"
    )
