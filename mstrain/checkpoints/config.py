"""What a run may choose about its checkpoints."""

import dataclasses

from mstrain.checks import at_least


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Save `every` so many steps (and at the end), `keep` the newest so many; stop after `max_failures` in a row."""

    every: int = 100
    keep: int = 3
    max_failures: int = 3

    def __post_init__(self):
        at_least("checkpoint", self, every=1, keep=1, max_failures=1)
