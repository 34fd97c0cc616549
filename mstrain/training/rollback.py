"""Rolls a run back: after too many bad steps, it resumes from an earlier checkpoint without the batches of these steps.

Every rollback is a line of `rollbacks.jsonl`. Its batches are skipped from then on: step k uses the k-th batch that is
not skipped. All skipped batches come after those of the restored checkpoint, so all attempts use the same batches.
Checkpoints repeat the list, so the run does not depend on the file.
"""

import contextlib
import dataclasses
import json
import math
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
    """The order of the batches of `run`, from the file on process 0 and from `saved`, the facts of the restored
    checkpoint.

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
    """The facts of the checkpoint of `step`, in `run_dir` or on the hosts; empty for step 0."""
    if step in checkpoints.steps:
        return checkpoints.facts(step)
    return local.facts(step) if local and step else {}


def tokens_before(saved: dict, done: int) -> int:
    """Tokens of the first `done` steps by `saved`, the facts of their checkpoint: `batch` and `seq` of an earlier
    attempt may have been others."""
    counts = [saved.get(name) for name in ("batch", "seq")]
    seen = saved.get("tokens_seen", done * math.prod(count for count in counts if isinstance(count, int)))
    return seen if isinstance(seen, int) else 0


def roll_back(
    run: Run, checkpoints: Checkpoints, local: LocalCheckpoints | None, order: BatchOrder, spike: Spike
) -> None:
    """Removes the checkpoints since the first step of `spike` and then records its batches. A run that is killed in
    between repeats the same steps and rolls back again.

    Raises Stopped without an older checkpoint, after too many rollbacks, and when a file cannot be
    written or removed.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # of a save that is about to be removed
        checkpoints.wait()
    saved = {*checkpoints.steps, *(local.steps() if local else ())}
    restored = max((step for step in saved if step < spike.first), default=None)
    if restored is None:
        raise Stopped(
            f"Stopped: {spike.reason}, and no checkpoint from before step {spike.first} exists to roll back to. "
            "Type another run_dir= with a smaller checkpoint.every= or a larger checkpoint.keep=."
        )
    if order.rollbacks >= run.config.guard.max_rollbacks:
        raise Stopped(
            f"Stopped: {spike.reason}, after {order.rollbacks} rollbacks. Type guard.max_rollbacks= above this "
            "number, with a lower optimizer.learning_rate= and allow=optimizer.learning_rate."
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
    """The values that define the batches which `line` numbers."""
    return {name: line.get(name) for name in DEFINES_BATCHES}


def _batches(line: dict) -> list[int]:
    skipped = line.get("skipped")
    return [batch for batch in skipped if isinstance(batch, int)] if isinstance(skipped, list) else []
