"""The run's files of one JSON object per line; a line that a kill cut short does not count."""

import json
import math
from pathlib import Path


def append(path: Path, values: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(values) + "\n")


def read(path: Path) -> list[dict]:
    """The whole lines in order; none when there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [values for values in map(_parse, lines) if values is not None]


def drop_after(path: Path, step: int) -> None:
    """Keeps the whole lines of steps up to `step`: those behind it were lost and will be made again."""
    if path.exists():
        kept = [values for values in read(path) if step_of(values) <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(values) + "\n" for values in kept))
        temporary.replace(path)


def step_of(values: dict) -> float:
    """The step of a line, behind all others when it has none."""
    step = values.get("step")
    return step if isinstance(step, int | float) else math.inf


def _parse(line: bytes) -> dict | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
