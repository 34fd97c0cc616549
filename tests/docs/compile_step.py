"""Compiles training steps for TPU slices that need not be present, and writes their rows of docs/data/steps.csv.

    python -m tests.docs.compile_step target=v5p-64 models=gpt3_175b layers=24 batch=16 seq=2048 meshes="4x8 8x4" \
        algorithms="meshslice collective"

The keys are those of benchmark.py. A row replaces that of the same step, algorithm, mesh, shard and options. After a
change that makes steps faster or slower, set the column `program` of the existing rows to `earlier`.

    python -m tests.docs.compile_step --slices KEY=VALUE ...

writes the rows of docs/data/slices.csv instead: steps in slice counts that steps.csv does not have, for the fit of
tests.planner.rescale. There a row is also identified by its plan.
"""

import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from mstrain.benchmarks.cases import make_cases, plan_case
from mstrain.benchmarks.config import BenchmarkConfig, load
from mstrain.benchmarks.programs import step_work
from mstrain.benchmarks.work import Work
from mstrain.compiler import Compiled, compile_program, make_target, predict, tpu_slice_devices
from mstrain.compiler.schedule import CompiledSchedule
from mstrain.hardware import Chip, compiler_options, mfu
from mstrain.models.plan import ModelPlan
from mstrain.program.memory import GIB
from mstrain.tuning.compiled import parts
from tests.docs.rows import replace_rows, write_rows
from tests.docs.steps import CURRENT, POD, SLICES, STEP, STEPS, pod_rows, read_steps

KEY = (*STEP, "algorithm", "mesh", "shard", "options")  # columns that identify a row
PARTS = {
    "exposed": "exposed_ms", "gemm": "products_ms", "kernel": "kernels_ms", "move": "copies_ms", "rest": "other_ms",
}  # fmt: skip


class Step(NamedTuple):
    """One compiled step, and its row of the table."""

    row: dict[str, str]
    plan: ModelPlan
    program: Compiled
    schedule: CompiledSchedule


def compile_steps(config: BenchmarkConfig) -> Iterator[Step]:
    """Compiles the step of every mesh and algorithm of a configuration with one model and a target."""
    tpu_slice = config.tpu_slice
    assert tpu_slice is not None and config.bench == "step", "the table has steps that were compiled"
    tpu_slice_devices(tpu_slice)  # before JAX initializes its backends, because it silences the compiler's log
    for mesh in config.meshes.split():
        one = dataclasses.replace(config, meshes=mesh)
        for case in make_cases(one, one.mesh_shapes):
            target = make_target(tpu_slice, case.mesh)
            dtype = jnp.dtype("bfloat16")
            plan = plan_case(case, config, target.mesh, tpu_slice, dtype)
            work = step_work(case, config, plan, dtype)
            program = compile_program(work.program, target, dump=config.dump)
            row = {
                "target": tpu_slice.name, "model": case.model.name, "layers": case.model.layers, "batch": case.batch,
                "seq": config.seq, "remat": config.remat, "algorithm": case.algorithm, "mesh": mesh,
                "shard": config.shard, "plan": work.plan, "options": own_options(tpu_slice.chip, plan.algorithm),
                "program": CURRENT,
            }  # fmt: skip
            schedule = predict(program)
            row |= _numbers(schedule, work, case.mesh.devices, tpu_slice.chip)
            yield Step({name: str(value) for name, value in row.items()}, plan, program, schedule)


def own_options(chip: Chip, algorithm: str | None) -> str:
    """The compiler options that the table of chips sets for this algorithm only (`ModelPlan.algorithm`)."""
    common = compiler_options(chip)
    found = {name: value for name, value in compiler_options(chip, algorithm).items() if name not in common}
    return " ".join(f"{name}={str(value).lower()}" for name, value in found.items())


def _numbers(schedule: CompiledSchedule, work: Work, devices: int, chip: Chip) -> dict[str, object]:
    times, (low, high) = parts(schedule), schedule.bounds
    share = mfu(work.flops, schedule.seconds, devices, chip.peak("bfloat16"))
    assert share is not None, "TPUs have a published peak"
    return {
        "ms": f"{1e3 * schedule.seconds:.1f}", "low_ms": f"{1e3 * low:.1f}", "high_ms": f"{1e3 * high:.1f}",
        "mfu_percent": f"{100 * share:.1f}", "hidden_percent": f"{100 * (schedule.hidden or 0):.0f}",
        "blocking": schedule.blocking, "collectives": len(schedule.transfers),
        **{column: f"{1e3 * times[name]:.1f}" for name, column in PARTS.items()},
        "memory_gib": f"{schedule.memory.peak / GIB:.1f}", "fits": str(schedule.memory.fits).lower(),
        "libtpu": importlib.metadata.version("libtpu"),
    }  # fmt: skip


def write_row(row: dict[str, str]) -> None:
    """Replaces the row with the same `KEY`, or adds the row after those of its step."""
    columns = list(read_steps()[0])
    replace_rows(STEPS, columns, KEY, [row], near=STEP)
    write_rows(POD, columns, pod_rows())


def write_slices(row: dict[str, str]) -> None:
    """The same for docs/data/slices.csv."""
    replace_rows(SLICES, list(read_steps()[0]), (*KEY, "plan"), [row], near=STEP)


if __name__ == "__main__":
    slices = sys.argv[1:2] == ["--slices"]
    for step in compile_steps(load(sys.argv[1 + slices :])):
        (write_slices if slices else write_row)(step.row)
        print(step.row, flush=True)
