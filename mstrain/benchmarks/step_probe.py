"""Training steps as probes: the whole step is timed, and predicted from its compiled text."""

import dataclasses
from typing import Any

import jax

from mstrain.benchmarks.cases import make_cases, plan_case
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.benchmarks.probes import Probe
from mstrain.benchmarks.programs import step_work
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.program.dtype import dtype_on
from mstrain.program.program import text_of

REFERENCE = ("reference step",)


def step_probe(config: BenchmarkConfig, algorithm: str, keys: dict[str, Any], key: tuple) -> tuple[Probe, str]:
    """A training step that continues from its own result, and its compiled text. `keys` are those of benchmark.py."""
    chosen = {name: value for name, value in keys.items() if name != "meshes"}
    one = dataclasses.replace(config, bench="step", check=False, calibration=None, algorithms=algorithm, **chosen)
    (case,) = make_cases(one, [parse_mesh(keys["meshes"])])
    mesh = make_mesh(case.mesh, jax.devices()[: case.mesh.devices])
    dtype = dtype_on("cpu", one.dtype)
    work = step_work(case, one, plan_case(case, one, mesh, None, dtype), dtype)
    compiled = work.program.compile()
    state, *rest = work.start()

    def run():
        nonlocal state
        state, metrics = compiled(state, *rest)
        return state, metrics

    return Probe(key, 1, run), text_of(compiled)


def reference_step(config: BenchmarkConfig, mesh: str) -> tuple[Probe, str]:
    """The small step whose measured time, over the sum of its instructions' times, is a calibration's `step_ratio`."""
    return step_probe(config, "collective", {"meshes": mesh, "models": "tiny", "layers": 3, "seq": 192}, REFERENCE)
