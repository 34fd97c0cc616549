"""Where the time went: seconds in steps, compilation, saving, restoring, input and evaluation, and those lost
to restarts.

`goodput.jsonl` in the run directory gets a line at every save and at the end; the last line of each life
counts.
"""

import contextlib
import json
import time
from pathlib import Path

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

    def lose(self, directory: Path, step_seconds: float) -> None:
        """Counts steps that must be made again, and the time since an earlier life was last heard of unless
        it finished."""
        lines = _lines(directory / FILE)
        self.seconds["lost"] += step_seconds
        metrics = directory / "metrics.jsonl"
        if metrics.exists() and not (lines and lines[-1]["finished"]):
            self.seconds["lost"] += max(self._begun - metrics.stat().st_mtime, 0.0)

    def write(self, directory: Path, finished: bool = False) -> None:
        """Adds a line for this life."""
        total = time.perf_counter() - self._started
        line = {"life": self._begun, "finished": finished, "total": total, **self.seconds}
        with open(directory / FILE, "a") as file:
            file.write(json.dumps(line) + "\n")


def account(directory: Path) -> dict:
    """All lives of a run: seconds by kind, `other` for the rest, their number, and the fraction spent in
    steps that count.

    The first life's start is what any run needs; compile, restore and the rest of later lives' starts are
    lost to restarts.
    """
    lives = list({line["life"]: line for line in _lines(directory / FILE)}.values())
    seconds = {kind: sum(life[kind] for life in lives) for kind in KINDS}
    seconds["other"] = sum(
        life["total"] - sum(life[kind] for kind in KINDS if kind != "lost") for life in lives
    )
    total = sum(life["total"] for life in lives) + seconds["lost"]
    return {"lives": len(lives), "seconds": seconds, "goodput": seconds["steps"] / total if total else None}


def _lines(path: Path) -> list[dict]:
    """Whole lines of the file; one cut short by a kill is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
