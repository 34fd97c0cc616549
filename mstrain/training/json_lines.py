"""Files with one JSON object per line. An incomplete last line is ignored."""

import json
import math
from pathlib import Path

from mstrain.training import files
from mstrain.training.best_effort import BestEffort


class Log:
    """One file, written through `observers`. Lines that cannot be written are kept and retried.

    With `done`, lines of later steps are dropped before the first line is written, because those steps are repeated.
    """

    def __init__(self, observers: BestEffort, path: Path, done: int | None = None):
        self._observers, self._path, self._done = observers, path, done
        self._file = files.Appender(observers, path.name, path, self._prepare)
        self._file.append()

    def append(self, values: dict) -> None:
        """Returns at once."""
        self._file.append(json.dumps(values).encode() + b"\n")

    def retry(self) -> None:
        """Retries to write lines that could not be written."""
        self._file.append()

    def _prepare(self) -> None:
        if self._done is not None:
            foreign = drop_after(self._path, self._done)
            self._done = None
            if foreign:
                self._observers.fail(self._path.name, f"content of another program was copied to {foreign}")
        files.end_line(self._path)


def read(path: Path) -> list[dict]:
    """The complete lines in order; empty if the file is missing.

    Raises OSError when the file cannot be read, ValueError when the path is not a file.
    """
    lines = files.read(path).splitlines()
    return [values for values in map(_parse, lines) if values is not None]


def drop_after(path: Path, step: int) -> Path | None:
    """Keeps the complete lines of steps up to `step`; later steps are repeated.

    A file with other content, except an incomplete last line, is first copied to NAME.foreign, which is returned.
    """
    content = files.read(path)
    lines = [_parse(line) for line in content.splitlines()]
    kept = [values for values in lines if values is not None and step_of(values) <= step]
    foreign = None
    if any(values is None or step_of(values) == math.inf for values in lines[:-1]):
        foreign = path.with_name(path.name + ".foreign")
        files.append(foreign, content)
    if kept != lines:
        files.replace(path, "".join(json.dumps(values) + "\n" for values in kept).encode())
    return foreign


def missing(path: Path, last: int, every: int) -> str:
    """Ranges of steps up to `last` without a line, such as `1-3, 7`, where there should be one every `every` steps.

    Empty when no line is missing.
    """
    steps = sorted({step for step in map(step_of, read(path)) if step <= last})
    pairs = zip([0, *steps], [*steps, last + 1])
    return ", ".join(_step_range(int(a) + 1, int(b) - 1) for a, b in pairs if b - a > every)


def _step_range(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def step_of(values: dict) -> float:
    """The step of a line; infinity when it has none."""
    step = values.get("step")
    return step if isinstance(step, int | float) else math.inf


def _parse(line: bytes) -> dict | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
