"""What a run may choose about its checkpoints."""

import dataclasses

from mstrain.checks import at_least


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep. The last step is always saved.

    Attributes:
      every: steps between saves; null saves by time alone.
      minutes: also save when so many minutes have passed since the last save; null saves by steps alone.
      keep: number of newest checkpoints to keep.
      keep_every: also save, and never delete, the checkpoints of every so many steps; null keeps none of them.
      max_failures: saves that fail in a row before the run stops.
    """

    every: int | None = 100
    minutes: float | None = None
    keep: int = 3
    keep_every: int | None = None
    max_failures: int = 3

    def __post_init__(self):
        at_least("checkpoint", self, keep=1, max_failures=1)
        given = {name: 1 for name in ("every", "keep_every") if getattr(self, name) is not None}
        at_least("checkpoint", self, **given)
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ValueError(
                f"checkpoint.minutes={self.minutes} is not a time. Type checkpoint.minutes=30, or null to save by steps."
            )
