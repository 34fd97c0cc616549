"""What run_dir holds of earlier attempts: checkpoints, the record of the run, and other signs of progress.

Nothing that counts as a sign is written before the first checkpoint, that of step 0, is committed. So signs without a
readable checkpoint mean a loss, and a run that was killed before it could save simply starts.
"""

import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path

from mstrain.job.job import Job
from mstrain.training import json_lines, record
from mstrain.training.goodput import FILE as GOODPUT
from mstrain.training.guard import FILE as BAD_STEPS
from mstrain.training.identity import LOST_STEPS, Record
from mstrain.training.reporter import EVALUATIONS, METRICS

DAMAGED, LOST = "damaged", "lost"
BY_STEP = (METRICS, EVALUATIONS, BAD_STEPS)
LINES = (*BY_STEP, GOODPUT, record.HISTORY)
SIGNS = (*LINES, record.RUN, DAMAGED)
# history.jsonl stays where it is, and rollbacks.jsonl: a new start must not meet the bad batches again.
MOVED = (*BY_STEP, GOODPUT, "summary.json", "loss.png", "tensorboard", record.RUN, DAMAGED)


@dataclasses.dataclass(frozen=True)
class Past:
    """Equal on all processes.

    Attributes:
      record: what the run is; None when no file says so.
      checkpoints: their steps, the newest first, whole or damaged.
      signs: names of files that show progress.
      steps: the last step that they show, 0 when there are checkpoints to continue from.
    """

    record: Record | None
    checkpoints: list[int]
    signs: list[str]
    steps: int

    def refuse_loss(self, run_dir: str, allowed: set[str]) -> None:
        """Raises ValueError when starting at step 0 would lose what the signs show and `allowed` does not say so."""
        permitted = [int(name.partition(":")[2]) for name in allowed if name.startswith(f"{LOST_STEPS}:")]
        if self.signs and not any(number >= self.steps for number in permitted):
            raise ValueError(
                f"run_dir={run_dir} has no checkpoint of its progress that can be read, but shows {self.steps} steps "
                f"of a run ({', '.join(self.signs)}). Starting at step 0 would lose them. Put a good checkpoint back, "
                f"type another run_dir=, or type allow={LOST_STEPS}:{self.steps} to start at step 0 (the files are "
                f"then kept in {run_dir}/{LOST}/)."
            )


def look(directory: Path, job: Job) -> Past:
    """Process 0 looks; raises ValueError on all when run.json is there and is not a record."""
    found = json.dumps(_look(directory)) if job.leads else ""
    found = json.loads(job.all_gather("look at run_dir", found)[0])
    if "error" in found:
        raise ValueError(found["error"])
    known = found["record"] and record.from_json(found["record"], str(directory))
    return Past(known, found["checkpoints"], found["signs"], found["steps"])


def set_aside(directory: Path) -> Path:
    """Moves the signs of a run whose checkpoints are lost into a folder of their own; returns it."""
    numbers = [int(path.name) for path in (directory / LOST).glob("*") if re.fullmatch(r"\d{1,9}", path.name)]
    target = directory / LOST / str(max(numbers, default=0) + 1)
    target.mkdir(parents=True)
    for name in MOVED:
        if os.path.lexists(directory / name):
            (directory / name).rename(target / name)
    return target


def _look(directory: Path) -> dict:
    try:
        known = record.read(directory)
    except ValueError as error:
        return {"error": str(error)}
    checkpoints = record.checkpoint_steps(directory)
    signs = [name for name in SIGNS if _is_sign(directory / name)]
    return {
        "record": known and record.to_json(known),
        "checkpoints": checkpoints,
        "signs": signs,
        "steps": _last_step(directory) if max(checkpoints, default=0) == 0 else 0,
    }


def _is_sign(path: Path) -> bool:
    """Whether `path` holds something of a run. What is of another kind, or has not one line, was never a run's file."""
    if path.name in LINES:
        with contextlib.suppress(OSError, ValueError):
            return bool(json_lines.read(path))
        return False
    if path.name == DAMAGED:
        return path.is_dir() and not path.is_symlink() and any(path.iterdir())
    return os.path.lexists(path)


def _last_step(directory: Path) -> int:
    steps = [0]
    for name in BY_STEP:
        with contextlib.suppress(OSError, ValueError):  # not a file
            found = (line.get("step") for line in json_lines.read(directory / name))
            steps += [step for step in found if type(step) is int]
    if (directory / DAMAGED).is_dir():
        names = [path.name.partition("-")[0] for path in (directory / DAMAGED).iterdir()]
        steps += [int(name) for name in names if re.fullmatch(r"\d{1,15}", name)]
    return max(steps)
