"""Detects bad steps: loss or gradients that are not finite, and loss spikes.

The compiled step skips the update when a number is not finite (`mstrain.program.step`). The guard logs the batches of
bad steps. Too many recent bad steps stop the run or roll it back. Every checkpoint includes the guard's history, so a
restart does not change its decisions.
"""

import collections
import dataclasses
import math
import statistics

from rich.console import Console

from mstrain.checks import at_least
from mstrain.training.batch_order import BatchOrder
from mstrain.training.json_lines import Log
from mstrain.training.stopped import Stopped

FILE = "bad_steps.jsonl"
LEAST_LOSSES = 10  # for a standard deviation


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """When bad steps stop a run. A step is bad when its loss or gradient norm is not finite; its update is skipped."""

    max_bad_steps: int = 10
    """Number of consecutive bad steps that stops the run."""
    max_bad_share: float = 0.5
    """Fraction of bad steps among the last `window` steps above which the run stops, from 0 to below 1. A run with
    fewer steps is checked at its end."""
    window: int = 20
    """Number of recent steps that `max_bad_share` and `spike` refer to, at least 10."""
    spike: float | None = None
    """Number of standard deviations above the mean loss of the last `window` good steps from which a step also counts
    as bad. Its update is applied. Null disables this check."""
    rollback: bool = False
    """Restore the newest checkpoint from before the bad steps and skip their batches instead of stopping."""
    max_rollbacks: int = 3
    """Number of rollbacks per run after which bad steps stop the run."""

    def __post_init__(self):
        at_least("guard", self, max_bad_steps=1, max_bad_share=0, window=LEAST_LOSSES, max_rollbacks=1)
        if self.max_bad_share >= 1:
            raise ValueError(
                f"guard.max_bad_share={self.max_bad_share} never stops a run. Type a share below 1, such as "
                "guard.max_bad_share=0.5."
            )
        if self.spike is not None and not 0 < self.spike < math.inf:
            raise ValueError(
                f"guard.spike={self.spike} is not a number of deviations. Type guard.spike=6, or null for none."
            )


@dataclasses.dataclass(frozen=True)
class Spike:
    """Steps `first` to `last`, and what is bad about them."""

    first: int
    last: int
    reason: str


class RollBack(Exception):
    """Ends an attempt because of `spike`. The next attempt resumes before it."""

    def __init__(self, spike: Spike):
        super().__init__(spike.reason)
        self.spike = spike


class Guard:
    """Called with the metrics of every step; raises Stopped or RollBack when too many are bad.

    Args:
      last: the last step of the run.
      order: the batch of each step.
      log: file of bad steps; None on processes that do not write it.
      history: result of `history()` from the restored checkpoint; other values mean none.
    """

    def __init__(
        self, config: GuardConfig, last: int, order: BatchOrder, log: Log | None, console: Console, history: object
    ):
        self._config, self._last, self.order, self._log, self._console = config, last, order, log, console
        before = history if isinstance(history, dict) else {}
        self.bad_steps, self._in_a_row = _count(before.get("bad_steps")), _count(before.get("in_a_row"))
        self._recent = collections.deque(map(bool, _list(before.get("recent"))), maxlen=config.window)
        losses = [loss for loss in _list(before.get("losses")) if isinstance(loss, int | float)]
        self._losses: collections.deque[float] = collections.deque(losses, maxlen=config.window)

    def history(self) -> dict:
        """The state that checkpoints keep: number of bad steps, recent results and losses. JSON values."""
        return {
            "bad_steps": self.bad_steps,
            "in_a_row": self._in_a_row,
            "recent": [int(bad) for bad in self._recent],
            "losses": list(self._losses),
        }

    def __call__(self, step: int, values: dict) -> None:
        reason = self._bad_step_reason(values)
        self._recent.append(reason is not None)
        if reason is None:
            self._in_a_row = 0
            self._losses.append(values["loss"])
        else:
            self._in_a_row += 1
            self.bad_steps += 1
            self._log_bad_step(step, reason)
        self._check_limits(step)

    def _log_bad_step(self, step: int, reason: str) -> None:
        batch, batches = self.order(step - 1), self.order.batches
        self._console.print(
            f"[yellow]Step {step}:[/] {reason}. It used batch {batch} of seed {batches.seed} in {batches.origin}."
        )
        if self._log:
            place = {"batch": batch, "seed": batches.seed, "file": batches.origin}
            self._log.append({"step": step, **place, "reason": reason})

    def _check_limits(self, step: int) -> None:
        config, bad, recent = self._config, sum(self._recent), len(self._recent)
        judged = recent if step == self._last else config.window
        if self._in_a_row >= config.max_bad_steps:
            first, found = step - self._in_a_row + 1, f"{self._in_a_row} bad steps in a row"
            key = "guard.max_bad_steps= above this number"
        elif bad > config.max_bad_share * judged:
            first, found = step - recent + 1 + self._recent.index(True), f"{bad} of the last {recent} steps are bad"
            key = "guard.max_bad_share= above this share"
        else:
            return
        if config.rollback:
            raise RollBack(Spike(first, step, found))
        raise Stopped(
            f"Stopped after step {step}: {found}, the last of batch {self.order(step - 1)}. Look at the batches in "
            f"{FILE}. Type guard.rollback=true to resume before these steps without their batches, together with a "
            f"lower optimizer.learning_rate= and allow=optimizer.learning_rate if it was too high; or {key}."
        )

    def _bad_step_reason(self, values: dict) -> str | None:
        if values["skipped"]:
            norm, loss = values["grad_norm"], values["loss"]
            return f"the loss is {loss:.4g} and the gradient norm {norm:.4g}; the update was skipped"
        if self._config.spike is None or len(self._losses) < LEAST_LOSSES:
            return None
        mean, deviation = statistics.fmean(self._losses), statistics.stdev(self._losses)
        if values["loss"] <= mean + self._config.spike * deviation:
            return None
        before = f"the last {len(self._losses)} ({mean:.4f} +- {deviation:.4f})"
        return f"the loss {values['loss']:.4f} is a spike over {before}"


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _list(value: object) -> list:
    return value if isinstance(value, list) else []
