"""The table of bench=peers."""

import dataclasses
import json
import statistics
import subprocess
import sys
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


def compare_peers(config: BenchmarkConfig) -> Comparison:
    """The comparison of every peer on every model, on one device."""
    cases = [
        Case(model, MeshShape(), peer, config.batch or max(TOKENS // (config.seq or model.context), 1))
        for model in config.model_configs
        for peer in config.peer_names
    ]
    kind, platform = device()
    chip, dtype = chip_for(kind), jnp.dtype(dtype_on(platform, config.dtype)).name
    head = Report("measured", f"Measured on one {kind}", config.bench, dtype, chip.peak(dtype) if chip else None)

    def rows_of(case: Case) -> Iterator[Row]:
        yield row_of(case, config, head.peak)

    return Comparison(head, cases, 1, rows_of)


def row_of(case: Case, config: BenchmarkConfig, peak: float | None) -> Row:
    """The row of one peer; raises RuntimeError with the last line of a process that failed."""
    seq = config.seq or case.model.context
    model = dataclasses.replace(case.model, context=max(case.model.context, seq))  # learned positions, as asked
    outcome = measure(Task(
        case.algorithm, model, case.batch, seq, config.dtype, config.warmup, config.repeats, config.seed
    ))  # fmt: skip
    seconds, tokens = statistics.median(outcome.seconds), case.batch * seq
    flops = tokens * training_flops_per_token(case.model, seq)
    how = f"{case.batch} x {seq}, {outcome.how}"
    return Row(
        case.model.name, str(case.mesh), case.algorithm, "step", how, case.batch, seconds, tokens / seconds,
        flops / seconds, mfu(flops, seconds, 1, peak), memory=outcome.memory,
        compile_seconds=outcome.compile_seconds,
    )  # fmt: skip


def device() -> tuple[str, str]:
    """Kind and platform of the first device, asked of another process: one that knows it holds its memory."""
    return tuple(json.loads(_answer(WORKER, "device")))


def measure(task: Task) -> Outcome:
    """Runs a task in a process of its own; raises RuntimeError with the last line of its errors."""
    try:
        return Outcome.from_json(_answer(WORKER, task.to_json()))
    except RuntimeError as error:
        missing = "No module named" in str(error)
        raise RuntimeError(f"{task.peer}: {error}{'. Type pip install torch transformers.' * missing}") from None


def _answer(module: str, argument: str) -> str:
    try:
        done = subprocess.run([sys.executable, "-m", module, argument], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished within {SECONDS} s") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.strip().splitlines()[-1]
