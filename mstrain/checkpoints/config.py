"""The configuration of checkpoints."""

import dataclasses

from mstrain.checks import at_least, mounted


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep. The last step is always saved."""

    every: int | None = 100
    """Steps between saves. Null saves by time only."""
    minutes: float | None = None
    """Minutes after the last save at which a run also saves. Null saves by steps only."""
    keep: int = 3
    """Number of newest checkpoints to keep, at least 1."""
    keep_every: int | None = None
    """Steps between checkpoints that are never deleted. Null keeps only the newest `keep`."""
    max_failures: int = 3
    """Number of consecutive failed saves that stops the run."""
    local_dir: str | None = None
    """Folder on a local disk or in memory (`/dev/shm/mstrain`) of every host for frequent saves. A restart uses them
    when every shard is on its own host or, as a data-parallel replica, on another host."""
    local_every: int | None = None
    """Steps between saves to `local_dir`. Requires checkpoint.local_dir=."""

    def __post_init__(self):
        at_least("checkpoint", self, keep=1, max_failures=1)
        given = {name: 1 for name in ("every", "keep_every", "local_every") if getattr(self, name) is not None}
        at_least("checkpoint", self, **given)
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ValueError(
                f"checkpoint.minutes={self.minutes} is not a time. Type checkpoint.minutes=30, or null for none."
            )
        mounted("checkpoint.local_dir", self.local_dir)
        if (self.local_dir is None) != (self.local_every is None):
            raise ValueError(
                "checkpoint.local_dir and checkpoint.local_every belong together. Type "
                "checkpoint.local_dir=/dev/shm/mstrain checkpoint.local_every=10."
            )
        if self.every and self.local_every and self.local_every % self.every == 0:
            raise ValueError(
                f"checkpoint.local_every={self.local_every} has no effect: those steps are saved in run_dir. Type a "
                f"smaller number than checkpoint.every={self.every}."
            )
