"""Compiles programs for an absent TPU slice and predicts their time from their schedules."""

import dataclasses
import importlib.metadata
from collections.abc import Iterator

import jax.numpy as jnp

from mstrain.benchmarks.cases import Case, make_cases, plan_case
from mstrain.benchmarks.comparison import Comparison
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.programs import make_works
from mstrain.benchmarks.table import Report, Row, make_row
from mstrain.benchmarks.tuned import best_mesh
from mstrain.benchmarks.work import Work
from mstrain.compiler import Target, compile_program, make_target, predict, tpu_slice_devices
from mstrain.hardware import TpuSlice
from mstrain.hardware.efficiency import efficiency_of
from mstrain.mesh import MeshShape, shape_of
from mstrain.program.dtype import dtype_on
from mstrain.program.memory import GIB


def predict_all(config: BenchmarkConfig) -> Comparison:
    """The comparison of all cases, compiled for the target."""
    tpu_slice = config.tpu_slice
    assert tpu_slice is not None, "predictions need target="
    tpu_slice_devices(tpu_slice)  # before JAX initializes its backends, because it silences the compiler's log
    dtype = dtype_on("tpu", config.dtype)
    peak = tpu_slice.chip.peak(jnp.dtype(dtype).name)

    def rows_of(case: Case) -> Iterator[Row]:
        target = make_target(tpu_slice, case.mesh)
        plan = plan_case(case, config, target.mesh, tpu_slice, dtype)
        for work in make_works(case, config, plan, dtype):
            yield _row(case, work, target, config, peak)

    source = (
        f"Predicted for {tpu_slice.name} ({tpu_slice.devices} devices), from schedules compiled by libtpu "
        f"{importlib.metadata.version('libtpu')}, not run"
    )
    beyond = efficiency_of(tpu_slice.chip).schedule
    head = Report("predicted", source, config.bench, jnp.dtype(dtype).name, peak, beyond=beyond if beyond > 1 else None)
    return Comparison(head, make_cases(config, choose_meshes(config, tpu_slice)), config.parts, rows_of)


def _row(case: Case, work: Work, target: Target, config: BenchmarkConfig, peak: float | None) -> Row:
    shape = shape_of(target.mesh)
    name = f"{case.model.name} {shape} {case.algorithm} {work.part}"
    program = compile_program(dataclasses.replace(work.program, name=name), target, dump=config.dump)
    schedule = predict(program)
    case = dataclasses.replace(case, mesh=shape)
    need, have, problem = program.memory.peak, target.tpu_slice.chip.hbm_bytes, ""
    if have and not program.memory.fits:
        problem = f"does not fit, {need / GIB:.2f} of {have / GIB:.2f} GiB"
    low, high = schedule.bounds
    return make_row(
        case, work, schedule.seconds, peak, low=low, high=high, unknown=next(iter(schedule.ranges)),
        exposed=schedule.exposed, hidden=schedule.hidden, memory=need, problem=problem,
    )  # fmt: skip


def choose_meshes(config: BenchmarkConfig, tpu_slice: TpuSlice) -> list[MeshShape]:
    """The configured meshes; for `auto`, the planner's best mesh of every model."""
    if config.meshes == "all":
        return [MeshShape(1, *shape, replica=tpu_slice.count) for shape in tpu_slice.mesh_shapes()]
    if config.meshes != "auto":
        return config.mesh_shapes
    return list(dict.fromkeys(best_mesh(model, config, tpu_slice) for model in config.model_configs))
