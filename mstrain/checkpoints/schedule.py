"""Decides after which steps a run saves: by steps, by time, and at milestones, the same on all processes.

Clocks of hosts differ, so only process 0 decides by time, at a step where all processes exchange its decision.
Exchanging it at every step would cost a round trip per step, so process 0 also sets the step of the next exchange,
halfway to the time at which the save is due. There are about a dozen exchanges per save, and a run that becomes up to
twice as slow still saves on time.
"""

import json
import time

from mstrain.checkpoints.config import CheckpointConfig
from mstrain.job.job import Job


class Schedule:
    """Whether to save after a step. Call it once after every step, in order, on all processes.

    Args:
      config: intervals in steps and minutes.
      steps: the steps of this attempt; the last one of a run is always saved.
      job: the processes that must agree.
      clock: seconds, monotonic; only that of process 0 counts.
    """

    def __init__(self, config: CheckpointConfig, steps: range, job: Job, clock=time.monotonic):
        self._config, self._job, self._clock = config, job, clock
        self._last = steps[-1]
        self._exchange_at = steps[0]
        self._saved_at, self._saved_step = clock(), steps[0] - 1

    def __call__(self, step: int) -> bool:
        by_steps = any(interval and step % interval == 0 for interval in (self._config.every, self._config.keep_every))
        due = step == self._last or by_steps or self._due_by_time(step)
        if due:
            self._saved_at, self._saved_step, self._exchange_at = self._clock(), step, step + 1
        return due

    def is_local(self, step: int) -> bool:
        """Whether to save locally after `step`: not when the schedule saves it in run_dir. Call the schedule first."""
        return bool(self._config.local_every) and step % self._config.local_every == 0 and step != self._saved_step

    def _due_by_time(self, step: int) -> bool:
        if self._config.minutes is None or step < self._exchange_at:
            return False
        left = self._config.minutes * 60 - (self._clock() - self._saved_at)
        seconds_per_step = max(self._clock() - self._saved_at, 1e-9) / (step - self._saved_step)
        wait = max(int(left / seconds_per_step / 2), 1)
        decisions = self._job.all_gather("save by time", json.dumps([left <= 0, step + wait]))
        due, self._exchange_at = json.loads(decisions[0])
        return due
