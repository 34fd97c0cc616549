"""What a run may choose about its checkpoints."""

import dataclasses

from mstrain.checks import at_least, mounted


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep. The last step is always saved."""

    every: int | None = 100
    """Steps between saves. Null saves by time alone."""
    minutes: float | None = None
    """Also save when so many minutes have passed since the last save. Null saves by steps alone."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Also save, and never delete, a checkpoint every so many steps."""
    max_failures: int = 3
    """Saves that fail in a row before the run stops."""
    local_dir: str | None = None
    """Folder on a disk or in memory (`/dev/shm/mstrain`) of every host for frequent saves. A restart uses them when
    every shard is found on its host or as a data-parallel copy on another one."""
    local_every: int | None = None
    """Steps between saves to `local_dir`."""

    def __post_init__(self):
        at_least("checkpoint", self, keep=1, max_failures=1)
        given = {name: 1 for name in ("every", "keep_every", "local_every") if getattr(self, name) is not None}
        at_least("checkpoint", self, **given)
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ValueError(
                f"checkpoint.minutes={self.minutes} is not a time. Type checkpoint.minutes=30, or null for steps alone."
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
