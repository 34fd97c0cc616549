"""Bad numbers: steps whose loss or gradients are not finite, and losses far above those before.

The compiled step itself leaves parameters and moments alone when a number is not finite
(`mstrain.program.step`); the guard notes the batches of such steps and stops a run that no longer learns.
"""

import collections
import dataclasses
import math
import statistics

from rich.console import Console

from mstrain.checks import at_least
from mstrain.data import Batches
from mstrain.training.json_lines import Log
from mstrain.training.stopped import Stopped

FILE = "bad_steps.jsonl"


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Stop after `max_bad_steps` bad steps in a row.

    A step is bad when its loss or gradient norm is not finite, and, unless `spike` is null, when its loss
    lies more than `spike` standard deviations above the mean of the last `window`.
    """

    max_bad_steps: int = 10
    spike: float | None = None
    window: int = 100

    def __post_init__(self):
        at_least("guard", self, max_bad_steps=1, window=10)  # fewer make no deviation
        if self.spike is not None and not 0 < self.spike < math.inf:
            raise ValueError(
                f"guard.spike={self.spike} is no number of deviations. Type guard.spike=6, or null for none."
            )


class Guard:
    """Called with the metrics of every step; raises Stopped after `max_bad_steps` bad ones in a row."""

    def __init__(self, config: GuardConfig, batches: Batches, log: Log | None, console: Console):
        self._config, self._batches, self._log, self._console = config, batches, log, console
        self._in_a_row = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=config.window)

    def __call__(self, step: int, values: dict) -> None:
        reason = self._complaint(values)
        if reason is None:
            self._in_a_row = 0
            self._losses.append(values["loss"])
            return
        self._in_a_row += 1
        batch = f"batch {step - 1} of seed {self._batches.seed} in {self._batches.file.path}"
        self._console.print(f"[yellow]Step {step}:[/] {reason}. It was made of {batch}.")
        if self._log:
            facts = {
                "step": step,
                "batch": step - 1,
                "seed": self._batches.seed,
                "file": str(self._batches.file.path),
            }
            self._log.append({**facts, "reason": reason})
        if self._in_a_row >= self._config.max_bad_steps:
            raise Stopped(
                f"Stopped: {self._in_a_row} bad steps in a row, the last of {batch}. The checkpoints are "
                "those from before. Look at the batch; type a lower optimizer.learning_rate=, or "
                "guard.max_bad_steps= above this number."
            )

    def _complaint(self, values: dict) -> str | None:
        if values["skipped"]:
            norm, loss = values["grad_norm"], values["loss"]
            return f"the loss is {loss:.4g} and the gradient norm {norm:.4g}; the update was skipped"
        if self._config.spike is None or len(self._losses) < 10:
            return None
        mean, deviation = statistics.fmean(self._losses), statistics.stdev(self._losses)
        if values["loss"] <= mean + self._config.spike * deviation:
            return None
        before = f"the last {len(self._losses)} ({mean:.4f} +- {deviation:.4f})"
        return f"the loss {values['loss']:.4f} is a spike over {before}"
