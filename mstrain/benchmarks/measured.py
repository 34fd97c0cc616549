"""Runs programs on the devices present and measures their time."""

import math
import os
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mstrain.benchmarks.cases import Case, make_cases, plan_case
from mstrain.benchmarks.comparison import Comparison
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.programs import make_works
from mstrain.benchmarks.table import Report, Row, make_row
from mstrain.benchmarks.work import Work
from mstrain.hardware import chip_for, tpu_slice_of
from mstrain.mesh import EMULATED, MeshShape, emulate_devices, make_mesh
from mstrain.program.dtype import dtype_on
from mstrain.program.memory import memory_of


def measure(config: BenchmarkConfig) -> Comparison:
    """The comparison of all cases on the devices present."""
    meshes = start_devices(config)
    chip = chip_for(jax.devices()[0].device_kind)
    machine = tpu_slice_of(jax.devices()) or chip
    dtype = dtype_on(jax.devices()[0].platform, config.dtype)
    peak = chip.peak(jnp.dtype(dtype).name) if chip else None

    def rows_of(case: Case) -> Iterator[Row]:
        plan = plan_case(case, config, make_mesh(case.mesh, jax.devices()[: case.mesh.devices]), machine, dtype)
        for work in make_works(case, config, plan, dtype):
            yield _row(case, work, plan.mesh, config, peak)

    source = f"Measured on {describe_devices()}"
    if config.emulate:
        source += f", emulating {config.emulate} with equal activation shards per device"
    head = Report("measured", source, config.bench, jnp.dtype(dtype).name, peak)
    return Comparison(head, make_cases(config, meshes), config.parts, rows_of)


def start_devices(config: BenchmarkConfig) -> list[MeshShape]:
    """Emulates devices on a CPU; returns the meshes to run on, raises ValueError if one is too large."""
    wanted = [EMULATED] if config.meshes == "auto" else config.mesh_shapes
    emulate_devices(max(mesh.devices for mesh in wanted))
    if config.meshes == "auto" and jax.devices()[0].platform != "cpu":
        count = jax.device_count()
        rows = max(r for r in range(1, math.isqrt(count) + 1) if count % r == 0)
        wanted = [MeshShape(1, rows, count // rows)]
    for mesh in wanted:
        if mesh.devices > jax.device_count():
            raise ValueError(
                f"meshes={mesh} needs {mesh.devices} devices and {jax.device_count()} are present. Choose "
                "smaller meshes=, or target= to predict."
            )
    return wanted


def time_program(work: Work, warmup: int, repeats: int):
    """Compiles and runs a program; returns the compiled program and the seconds of each timed execution.

    An execution ends when every result is on its device.
    """
    compiled = work.program.compile()
    arguments, seconds = work.start(), []
    for _ in range(warmup + repeats):
        begin = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
        if work.carries:
            arguments = (results[0], *arguments[1:])
    return compiled, seconds[warmup:]


def _row(case: Case, work: Work, mesh: Mesh, config: BenchmarkConfig, peak: float | None) -> Row:
    compiled, seconds = time_program(work, config.warmup, config.repeats)
    return make_row(case, work, statistics.median(seconds), peak, memory=memory_of(compiled, mesh).peak)


def describe_devices() -> str:
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"{jax.device_count()} emulated CPU devices that share {os.cpu_count()} cores"
    return f"{jax.device_count()} x {device.device_kind}"
