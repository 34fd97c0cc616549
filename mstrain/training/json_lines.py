"""The run's files of one JSON object per line; a line that a kill cut short does not count."""

import json
import math
from pathlib import Path


def append(path: Path, values: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(values) + "\n")


def read(path: Path) -> list[dict]:
    """The whole lines in order; none when there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [values for values in map(_parse, lines) if values is not None]


def drop_after(path: Path, step: int) -> None:
    """Keeps the whole lines of steps up to `step`: those behind it were lost and will be made again."""
    if path.exists():
        kept = [values for values in read(path) if values.get("step", math.inf) <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(values) + "\n" for values in kept))
        temporary.replace(path)


def _parse(line: str) -> dict | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
