"""Accounts for the time of a run: steps, compilation, the first state, saving, restoring, input, evaluation, and steps
lost to restarts.

Input is the time in which the devices wait for data. A batch is made while the step before it runs, and counts only
where that step has ended. `goodput.jsonl` in the run directory gets a line at every save and at the end. The last line
of each attempt is used. Lost time is not part of an attempt's total.
"""

import collections
import contextlib
import time
from pathlib import Path

from mstrain.training import console as output
from mstrain.training import json_lines
from mstrain.training.best_effort import BestEffort

FILE = "goodput.jsonl"
KINDS = ("steps", "compile", "initialize", "save", "restore", "input", "evaluate", "lost")


class Goodput:
    """Seconds of this attempt by kind, from its creation on."""

    def __init__(self):
        self._begun, self._started = time.time(), time.perf_counter()
        self._earlier: list[dict] = []
        self._files: BestEffort | None = None
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._waited = 0.0  # for data, within the step that is not reported yet
        self._step, self._written_at = 0, [(0, 0.0)]  # the last step, and at every line with the seconds of steps

    @contextlib.contextmanager
    def spend(self, kind: str):
        """Counts the time inside as `kind`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start

    def timed(self, kind: str, function):
        """`function`, its time counted as `kind`."""

        def call(*args):
            with self.spend(kind):
                return function(*args)

        return call

    def fed(self, step_fn, feed):
        """(`step_fn`, `feed`), the time in which the devices have no step to run while `feed` runs counted as input.

        The end of a step is not observed: a step that ends while `feed` runs counts as if it had ended before.
        """
        running = None

        def fed(index):
            start = time.perf_counter()
            batch = feed(index)
            if running is None or running.is_ready():
                waited = time.perf_counter() - start
                self._waited += waited
                self.seconds["input"] += waited
            return batch

        def stepped(state, batch):
            nonlocal running
            state, metrics = step_fn(state, batch)
            running = metrics["loss"]
            return state, metrics

        return stepped, fed

    def step(self, step: int, values: dict) -> None:
        """Counts the time of a step from its metrics, without its wait for data."""
        self.seconds["steps"] += max(values["step_seconds"] - self._waited, 0.0)
        self._waited, self._step = 0.0, step

    def open(self, files: BestEffort, directory: Path, done: int) -> None:
        """Reads the lines of earlier attempts and writes the first one of this attempt. If this attempt is rolled back
        instead, its steps after `done` count as lost. `files` writes all lines.
        """
        self._files = files
        if self._step:
            self._roll_back(done)
        else:
            files.attempt(FILE, self._read_earlier, directory)
        self._log = json_lines.Log(files, directory / FILE)
        self.write()

    def write(self, finished: bool = False) -> None:
        """Adds a line for this attempt, on the process that has opened the file."""
        self._written = self._line(finished)
        self._written_at.append((self._step, self.seconds["steps"]))
        if self._files:
            self._log.append(self._written)

    def account(self) -> dict:
        """All attempts of the run until the last `write`: seconds by kind, `other` for the rest, their number, the
        failures of observers by name, and the fraction of the time spent in steps that count.
        """
        attempts = [*self._earlier, self._written]
        seconds = {kind: sum(attempt[kind] for attempt in attempts) for kind in KINDS}
        accounted = sum(seconds.values()) - seconds["lost"]
        total = sum(attempt["total"] for attempt in attempts)
        failures = sum(
            (collections.Counter(attempt["observer_failures"]) for attempt in attempts), collections.Counter()
        )
        return {
            "attempts": len(attempts),
            "seconds": {**seconds, "other": total - accounted},
            "goodput": seconds["steps"] / (total + seconds["lost"]),
            "observer_failures": dict(failures),
        }

    def _line(self, finished: bool) -> dict:
        total = time.perf_counter() - self._started
        failures = self._files.failures + output.failures() if self._files else {}
        return {"attempt": self._begun, "finished": finished, "total": total, **self.seconds,
                "observer_failures": dict(failures)}  # fmt: skip

    def _roll_back(self, done: int) -> None:
        """Counts the time of steps after `done` as lost, and no longer as that of steps or in the total."""
        self._written_at = [(step, seconds) for step, seconds in self._written_at if step <= done]
        lost = self.seconds["steps"] - self._written_at[-1][1]
        self.seconds["steps"] -= lost
        self.seconds["lost"] += lost
        self._started += lost

    def _read_earlier(self, directory: Path) -> None:
        """Counts the time since the last line of an earlier attempt that did not finish as lost: it waited to be
        restarted, or made steps that are repeated.
        """
        attempts = {line["attempt"]: line for line in map(_checked, json_lines.read(directory / FILE)) if line}
        attempts.pop(self._begun, None)
        self._earlier = list(attempts.values())
        if self._earlier and not (last := self._earlier[-1])["finished"]:
            self.seconds["lost"] += max(self._begun - (last["attempt"] + last["total"]), 0.0)


def _checked(line: dict) -> dict | None:
    """A line with every key and a number for each; None when it names no attempt."""
    if not isinstance(line.get("attempt"), int | float):
        return None
    failures = line.get("observer_failures")
    counts = {name: int(_number(count)) for name, count in failures.items()} if isinstance(failures, dict) else {}
    numbers = {kind: _number(line.get(kind)) for kind in ("attempt", "total", *KINDS)}
    return {**numbers, "finished": line.get("finished") is True, "observer_failures": counts}


def _number(value: object) -> float:
    """`value`, or 0 when it is not a finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < 2**63 else 0.0
