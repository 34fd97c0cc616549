"""Where the time went: steps, compilation, saving, restoring, input, evaluation, and what restarts cost.

`goodput.jsonl` in the run directory gets a line at every save and at the end; the last line of each life
counts.
"""

import contextlib
import time
from pathlib import Path

from mstrain.training import json_lines
from mstrain.training.reporter import METRICS

FILE = "goodput.jsonl"
KINDS = ("steps", "compile", "save", "restore", "input", "evaluate", "lost")


class Goodput:
    """Seconds of this life by kind, from its creation on."""

    def __init__(self):
        self._begun, self._started = time.time(), time.perf_counter()
        self.seconds = dict.fromkeys(KINDS, 0.0)

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

    def step(self, step: int, values: dict) -> None:
        """Counts the time of a step from its metrics."""
        self.seconds["steps"] += values["step_seconds"]

    def lose(self, directory: Path, done: int) -> None:
        """Counts the steps after `done`, which will be made again, and the time since the last sign of an
        earlier life, unless that one finished.
        """
        lines = json_lines.read(directory / FILE)
        metrics = directory / METRICS
        lost = (line for line in json_lines.read(metrics) if json_lines.step_of(line) > done)
        self.seconds["lost"] += sum(line.get("step_seconds") or 0.0 for line in lost)
        if metrics.exists() and not (lines and lines[-1]["finished"]):
            self.seconds["lost"] += max(self._begun - metrics.stat().st_mtime, 0.0)

    def write(self, directory: Path, finished: bool = False) -> None:
        """Adds a line for this life."""
        total = time.perf_counter() - self._started
        line = {"life": self._begun, "finished": finished, "total": total, **self.seconds}
        json_lines.append(directory / FILE, line)


def account(directory: Path) -> dict:
    """All lives of a run: seconds by kind, `other` for the rest, their number, and the fraction spent in
    steps that count.
    """
    lives = list({line["life"]: line for line in json_lines.read(directory / FILE)}.values())
    seconds = {kind: sum(life[kind] for life in lives) for kind in KINDS}
    seconds["other"] = sum(
        life["total"] - sum(life[kind] for kind in KINDS if kind != "lost") for life in lives
    )
    total = sum(life["total"] for life in lives) + seconds["lost"]
    return {"lives": len(lives), "seconds": seconds, "goodput": seconds["steps"] / total if total else None}
