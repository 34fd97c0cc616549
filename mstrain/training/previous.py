"""Inspects run_dir for earlier attempts: checkpoints, the record of the run, and other files that show progress.

These files are written only after the first checkpoint, that of step 0. So such files without a readable checkpoint
mean that checkpoints are lost, and a run that was killed before its first save starts normally.
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
PROGRESS_FILES = (*LINES, record.RUN, DAMAGED)
# history.jsonl and rollbacks.jsonl are not moved: a new start must also skip the bad batches.
MOVED = (*BY_STEP, GOODPUT, "summary.json", "loss.png", "tensorboard", record.RUN, DAMAGED)


@dataclasses.dataclass(frozen=True)
class PreviousAttempts:
    """What earlier attempts left in run_dir; equal on all processes.

    Attributes:
      record: configuration and digests of the run; None without a record.
      checkpoints: steps of all checkpoints, including damaged ones, newest first.
      progress_files: names of the files that show progress.
      steps: last step in these files; 0 when there are checkpoints to resume from.
    """

    record: Record | None
    checkpoints: list[int]
    progress_files: list[str]
    steps: int

    def refuse_loss(self, run_dir: str, allowed: set[str]) -> None:
        """Raises ValueError when a start at step 0 would lose progress and `allowed` does not permit that."""
        permitted = [int(name.partition(":")[2]) for name in allowed if name.startswith(f"{LOST_STEPS}:")]
        if self.progress_files and not any(number >= self.steps for number in permitted):
            raise ValueError(
                f"run_dir={run_dir} has no checkpoint of its progress that can be read, but shows {self.steps} steps "
                f"of a run ({', '.join(self.progress_files)}). Starting at step 0 would lose them. Put a good "
                f"checkpoint back, type another run_dir=, or type allow={LOST_STEPS}:{self.steps} to start at step 0 "
                f"(the files are then kept in {run_dir}/{LOST}/)."
            )


def inspect_run_dir(directory: Path, job: Job) -> PreviousAttempts:
    """Process 0 inspects `directory`. Raises ValueError on all processes when run.json is not a record."""
    found = json.dumps(_inspect(directory)) if job.leads else ""
    found = json.loads(job.all_gather("inspect run_dir", found)[0])
    if "error" in found:
        raise ValueError(found["error"])
    known = found["record"] and record.from_json(found["record"], str(directory))
    return PreviousAttempts(known, found["checkpoints"], found["progress_files"], found["steps"])


def set_aside(directory: Path) -> Path:
    """Moves the files of a run whose checkpoints are lost into a folder of their own; returns that folder."""
    numbers = [int(path.name) for path in (directory / LOST).glob("*") if re.fullmatch(r"\d{1,9}", path.name)]
    target = directory / LOST / str(max(numbers, default=0) + 1)
    target.mkdir(parents=True)
    for name in MOVED:
        if os.path.lexists(directory / name):
            (directory / name).rename(target / name)
    return target


def _inspect(directory: Path) -> dict:
    try:
        known = record.read(directory)
    except ValueError as error:
        return {"error": str(error)}
    checkpoints = record.checkpoint_steps(directory)
    progress_files = [name for name in PROGRESS_FILES if _shows_progress(directory / name)]
    return {
        "record": known and record.to_json(known),
        "checkpoints": checkpoints,
        "progress_files": progress_files,
        "steps": _last_step(directory) if max(checkpoints, default=0) == 0 else 0,
    }


def _shows_progress(path: Path) -> bool:
    """Whether `path` is a file of a run: of the expected kind and not empty."""
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
