"""The time of collectives on a ring of links."""

from dataclasses import dataclass

NETWORK_HOP = 10e-6  # seconds per message between nodes; assumed. NCCL's own estimate for a ring (Simple) is 14 us


@dataclass(frozen=True)
class Link:
    """The link of one kind of collective along one mesh axis.

    `launch` is the latency of the collective and `sync` that of each of its steps, in seconds; `bandwidth` is in
    bytes/s. Raises ValueError unless the bandwidth is positive and the latencies are not negative.
    """

    launch: float
    sync: float
    bandwidth: float

    def __post_init__(self):
        if self.bandwidth <= 0 or self.launch < 0 or self.sync < 0:
            raise ValueError(f"{self}: bandwidth must be positive (bytes/s), launch and sync >= 0 (seconds)")


def collective_seconds(link: Link, shard_bytes: float, participants: int) -> float:
    """Seconds of a ring all-gather or reduce-scatter (MeshSlice paper section 3.2.2).

    `shard_bytes` is sent by each device in each of the `participants - 1` steps: its shard for an all_gather, a shard
    of the result for a reduce_scatter. Returns 0 for one participant.
    """
    if participants == 1:
        return 0.0
    return link.launch + (participants - 1) * (link.sync + shard_bytes / link.bandwidth)


def ring_seconds(kind: str, nbytes: float, size: int, link: Link) -> float:
    """Seconds of a bandwidth-optimal ring collective of `size` participants (Patarasuk and Yuan, 2009).

    `nbytes` is the size of one participant's input: the whole tensor for AllReduce, ReduceScatter and Reduce, its shard
    for AllGather and Gather; for Broadcast and Scatter, the tensor of the source.
    Raises ValueError for an unknown kind.
    """
    if kind in ("ReduceScatter", "Scatter"):
        return collective_seconds(link, nbytes / size, size)
    if kind in ("AllGather", "Gather"):
        return collective_seconds(link, nbytes, size)
    if kind == "AllReduce":  # a reduce-scatter and an all-gather, launched together
        return 2 * collective_seconds(link, nbytes / size, size) - (link.launch if size > 1 else 0.0)
    if kind in ("Broadcast", "Reduce"):  # pipelined in small pieces
        return link.launch + (size - 1) * link.sync + nbytes / link.bandwidth if size > 1 else 0.0
    raise ValueError(
        f"Unknown collective {kind!r}. Use AllReduce, ReduceScatter, AllGather, Gather, Scatter, Broadcast or Reduce."
    )
