"""What a collective costs on a link: the one formula that tuner and planner share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One kind of collective along one mesh axis: launch and sync in seconds, bandwidth in bytes/s."""

    launch: float
    sync: float
    bandwidth: float

    def __post_init__(self):
        if self.bandwidth <= 0 or self.launch < 0 or self.sync < 0:
            raise ValueError(f"{self}: bandwidth must be positive (bytes/s), launch and sync >= 0 (seconds)")


def collective_seconds(link: Link, shard_bytes: float, participants: int) -> float:
    """Seconds of a ring all-gather or reduce-scatter (MeshSlice paper section 3.2.2).

    `shard_bytes` is what one device sends in one of the `participants - 1` steps: its own shard for an
    all-gather, its part of the result for a reduce-scatter. One participant needs no collective: 0.
    """
    if participants == 1:
        return 0.0
    return link.launch + (participants - 1) * (link.sync + shard_bytes / link.bandwidth)
