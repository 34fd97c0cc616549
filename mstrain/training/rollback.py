"""Rolling back: after too many bad steps, from a checkpoint before them, past the batches they were made of.

Every rollback is a line of `rollbacks.jsonl`. The batches it names are skipped from then on: step k is made of the k-th
batch that is not skipped. All skipped batches come after those of the restored checkpoint, so every attempt, restarted
or not, sees the same batches. Checkpoints repeat the list, so that a lost file changes nothing.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.checkpoints.local import LocalCheckpoints
from mstrain.training import files, json_lines
from mstrain.training.batch_order import BatchOrder
from mstrain.training.guard import Spike
from mstrain.training.resume import DEFINES_BATCHES, facts
from mstrain.training.run import Run
from mstrain.training.stopped import Stopped

FILE = "rollbacks.jsonl"


def read_order(run: Run, saved: dict) -> BatchOrder:
    """The order of `run`'s batches, by process 0's file and by `saved`, the facts of the checkpoint that is resumed.

    Raises ValueError when the file cannot be read.
    """
    own = ""
    if run.job.leads:
        try:
            lines = json_lines.read(_path(run))
        except OSError as error:
            raise ValueError(f"Cannot read {_path(run)} ({error.strerror}). It names batches to skip.") from None
        own = json.dumps([line for line in [*lines, saved] if _data(line) == _data(facts(run))])
    found = json.loads(run.job.all_gather("skipped batches", own)[0])
    skipped = {batch for line in found for batch in _batches(line)}
    return BatchOrder(run.feed.batches, skipped, sum("first" in line for line in found))


def saved_facts(step: int, checkpoints: Checkpoints, local: LocalCheckpoints | None) -> dict:
    """What the checkpoint of `step` says of its run, in `run_dir` or on the hosts; nothing for step 0."""
    if step in checkpoints.steps:
        return checkpoints.facts(step)
    return local.facts(step) if local and step else {}


def roll_back(
    run: Run, checkpoints: Checkpoints, local: LocalCheckpoints | None, order: BatchOrder, spike: Spike
) -> None:
    """Removes the checkpoints since the first step of `spike` and records its batches, in this order: a run that is
    killed in between makes the same steps and gets here again.

    Raises Stopped when there is no older checkpoint, when there were too many rollbacks, and when a file cannot be
    written or removed.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # of a save that is about to be removed
        checkpoints.wait()
    saved = {*checkpoints.steps, *(local.steps() if local else ())}
    restored = max((step for step in saved if step < spike.first), default=None)
    if restored is None:
        raise Stopped(
            f"Stopped: {spike.reason}, and there is no checkpoint from before step {spike.first} to roll back to. "
            "Type a smaller checkpoint.every= or a larger checkpoint.keep=."
        )
    if order.rollbacks >= run.config.guard.max_rollbacks:
        raise Stopped(
            f"Stopped: {spike.reason}, after {order.rollbacks} rollbacks. Type a lower optimizer.learning_rate=, or "
            "guard.max_rollbacks= above this number."
        )
    batches = [order(step - 1) for step in range(spike.first, spike.last + 1)]
    line = {**_data(facts(run)), **dataclasses.asdict(spike), "restored": restored, "skipped": batches}
    if local:
        local.drop_after(restored)
    try:
        for step in checkpoints.steps:
            if step >= spike.first:
                checkpoints.delete(step)
        if run.job.leads:
            files.end_line(_path(run))
            files.append(_path(run), json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise Stopped(f"Stopped: {spike.reason}, and rolling back failed ({error.strerror or error}).") from error
    run.job.barrier("rolled back")
    run.console.print(
        f"[yellow]Rollback:[/] {spike.reason}. Resuming from step {restored} without batches {batches[0]} to "
        f"{batches[-1]} (noted in {_path(run)})."
    )


def _path(run: Run) -> Path:
    return Path(run.config.run_dir) / FILE


def _data(line: dict) -> dict:
    """What defines the batches that `line` numbers."""
    return {name: line.get(name) for name in DEFINES_BATCHES}


def _batches(line: dict) -> list[int]:
    skipped = line.get("skipped")
    return [batch for batch in skipped if isinstance(batch, int)] if isinstance(skipped, list) else []
