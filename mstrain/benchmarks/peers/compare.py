"""The table of bench=peers."""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import jax.numpy as jnp

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.comparison import Comparison
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.peers.task import Outcome, Task
from mstrain.benchmarks.table import Report, Row
from mstrain.hardware import chip_for, mfu
from mstrain.mesh import MeshShape
from mstrain.models.flops import training_flops_per_token
from mstrain.program.dtype import dtype_on

WORKER = "mstrain.benchmarks.peers.worker"
TOKENS = 1 << 15  # of a step without batch=
SECONDS = 300  # of one process
BUDGET = 450  # seconds of all processes together: the command takes less than eight minutes


def compare_peers(config: BenchmarkConfig) -> Comparison:
    """The comparison of every peer on every model, on one device, within BUDGET: peer by peer, mstrain first."""
    cases = [
        Case(model, MeshShape(), peer, config.batch or max(TOKENS // (config.seq or model.context), 1))
        for peer in config.peer_names
        for model in config.model_configs
    ]
    ends = time.monotonic() + BUDGET
    kind, platform = device()
    chip, dtype = chip_for(kind), jnp.dtype(dtype_on(platform, config.dtype)).name
    head = Report("measured", f"Measured on one {kind}", config.bench, dtype, chip.peak(dtype) if chip else None)

    def rows_of(case: Case) -> Iterator[Row]:
        left = ends - time.monotonic()
        if left < 1:
            advice = f"Type peers={case.algorithm} models={case.model.name} for this row alone."
            raise RuntimeError(f"not started, because the time limit of {BUDGET} s has passed. {advice}")
        yield row_of(case, config, head.peak, min(SECONDS, left))

    return Comparison(head, cases, 1, rows_of)


def row_of(case: Case, config: BenchmarkConfig, peak: float | None, limit: float) -> Row:
    """The row of one peer; raises RuntimeError with the last line of a process that failed or took `limit` seconds."""
    seq = config.seq or case.model.context
    model = dataclasses.replace(case.model, context=max(case.model.context, seq))  # learned positions, as asked
    task = Task(case.algorithm, model, case.batch, seq, config.dtype, config.warmup, config.repeats, config.seed)
    outcome = measure(task, limit)
    seconds, tokens = statistics.median(outcome.seconds), case.batch * seq
    flops = tokens * training_flops_per_token(case.model, seq)
    how = f"{case.batch} x {seq}, {outcome.how}"
    return Row(
        case.model.name, str(case.mesh), case.algorithm, "step", how, case.batch, seconds, tokens / seconds,
        flops / seconds, mfu(flops, seconds, 1, peak), memory=outcome.memory,
        compile_seconds=outcome.compile_seconds,
    )  # fmt: skip


def device() -> tuple[str, str]:
    """Kind and platform of the first device, determined in another process, because a process that initializes the
    device keeps its memory."""
    return tuple(json.loads(_answer(WORKER, "device", SECONDS)))


def measure(task: Task, limit: float = SECONDS) -> Outcome:
    """Runs a task in a process of its own, for `limit` seconds at most; raises RuntimeError with the last line of its
    errors."""
    try:
        return Outcome.from_json(_answer(WORKER, task.to_json(), limit))
    except RuntimeError as error:
        missing = "No module named" in str(error)
        raise RuntimeError(f"{task.peer}: {error}{'. Type pip install torch transformers.' * missing}") from None


def _answer(module: str, argument: str, limit: float) -> str:
    try:
        done = subprocess.run([sys.executable, "-m", module, argument], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished within {limit:.0f} s") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.strip().splitlines()[-1]
