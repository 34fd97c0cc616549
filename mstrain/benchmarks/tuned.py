"""bench=tune: the planner's ranking of meshes for a model, with the reason why each other mesh is slower."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.display.tables import make_table, write_csv
from mstrain.gemm import find_algorithm
from mstrain.hardware import TpuSlice, chip_named
from mstrain.hardware.calibration import read_constants
from mstrain.hardware.pod import Pod, pod_of
from mstrain.json_files import write_json
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig
from mstrain.planner.cost import Costed
from mstrain.planner.report import GB, plan_row, plot_plans
from mstrain.planner.request import PlanRequest
from mstrain.planner.search import rank_meshes, why_slower
from mstrain.program.dtype import dtype_on

DEFAULT_DEVICES = 8  # of the emulated mesh


def best_mesh(model: ModelConfig, config: BenchmarkConfig, tpu_slice: TpuSlice) -> MeshShape:
    """The planner's best mesh of a TPU slice for MeshSlice, or for the first algorithm without MeshSlice."""
    names = config.algorithm_names
    question = _question(model, config, tpu_slice, next(filter(_sliced, names), names[0]))
    return rank_meshes(question, best_only=True)[0].shape


def _sliced(algorithm: str) -> bool:
    return find_algorithm(algorithm).sliced


def tune_model(
    model: ModelConfig, config: BenchmarkConfig, tpu_slice: TpuSlice | None
) -> tuple[PlanRequest, list[Costed]]:
    """Ranks the meshes of a TPU slice or of emulated CPU devices; returns the request and the ranking."""
    shapes = config.mesh_shapes if config.meshes not in ("auto", "all") else []
    if len({shape.devices for shape in shapes}) > 1:
        raise ValueError("bench=tune compares meshes of equal size. Type meshes= with as many devices each.")
    devices = shapes[0].devices if shapes else tpu_slice.devices if tpu_slice else DEFAULT_DEVICES
    if tpu_slice and devices != tpu_slice.devices:
        raise ValueError(f"{tpu_slice.name} has {tpu_slice.devices} devices, not {devices}. Type meshes= to fill it.")
    request = _question(model, config, tpu_slice, "meshslice", devices)
    if not shapes:
        return request, rank_meshes(request)
    asked = [dataclasses.replace(request, fixed=request.fixed.on(shape)) for shape in dict.fromkeys(shapes)]
    found = [costed for each in asked for costed in rank_meshes(each)]
    return request, sorted(found, key=lambda costed: (not costed.fits, costed.seconds))


def _question(
    model: ModelConfig, config: BenchmarkConfig, tpu_slice: TpuSlice | None, algorithm: str, devices: int | None = None
) -> PlanRequest:
    dtype = jnp.dtype(dtype_on("tpu" if tpu_slice else "cpu", config.dtype)).name
    emulated = Pod("emulated", chip_named("cpu"), devices or DEFAULT_DEVICES)
    pod = pod_of(tpu_slice, tpu_slice.devices) if tpu_slice else emulated
    if config.calibration:
        measured = pod if tpu_slice else dataclasses.replace(pod, measured=read_constants("cpu_emulated"))
        pod = measured.calibrated(config.calibration, dtype)
    elif config.constants or not tpu_slice:
        pod = dataclasses.replace(pod, measured=read_constants(config.constants or "cpu_emulated"))
    parallel = config.parallel(algorithm)
    if _sliced(algorithm) and config.bench == "tune" and config.one_slice_count:
        parallel = dataclasses.replace(parallel, slices=str(config.one_slice_count))
    return PlanRequest.of(config.step_config(model, config.sequences(pod.devices), parallel, dtype), pod)


def explain_all(config: BenchmarkConfig, console: Console) -> int:
    """Prints the table of candidates of every model and writes it to run_dir as JSON, CSV and plot."""
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for model in config.model_configs:
        request, found = tune_model(model, config, config.tpu_slice)
        best, stem = found[0], folder / f"tune_{model.name}"
        console.print(to_table(request, found), width=max(console.width, 120))  # narrower columns truncate numbers
        chosen = " ".join(f"{p.name} {p.layout.dataflow} S={p.slices};" for p in best.products.block)
        console.print(f"[bold]{model.name}[/]: mesh {best.shape}, {chosen.rstrip(';')}")
        rows = [plan_row(request, rank, costed, best) for rank, costed in enumerate(found, 1)]
        document = {
            "model": model.name,
            "constants": best.step.at.constants.source,
            "mesh": str(best.shape),
            "candidates": rows,
        }
        write_json(document, stem.with_suffix(".json"))
        write_csv(rows, stem.with_suffix(".csv"))
        plot_plans(request, found, stem.with_suffix(".png"))
        share = best.terms.tensor_exposed / best.seconds
        console.print(
            f"By the cost model, not measured: {share:.1%} of the step is exposed communication of products. "
            f"Written: {stem}.json .csv .png", soft_wrap=True,
        )  # fmt: skip
    return 0


def to_table(request: PlanRequest, found: list[Costed]) -> Table:
    """The table of the ten best candidates."""
    name = request.pod.constants((1, request.pod.devices, 1, 1, 1), request.dtype).name
    title = f"Predicted for {request.pod.name} with {name}, batch {request.batch} x {request.seq}"
    left, rows = ("mesh", "dataflows", "slices", "why"), []
    for costed in found[:10]:
        terms, block = costed.terms, costed.products.block
        why = why_slower(costed, found[0]) if costed.fits else "does not fit"
        rows.append((
            str(costed.shape), " ".join(p.layout.dataflow for p in block), " ".join(str(p.slices) for p in block), why,
            *(f"{1e3 * value:.3f}" for value in (costed.seconds, terms.products, terms.tensor_exposed)),
            f"{costed.fullest.total / GB:.2f}",
        ))  # fmt: skip
    columns = (*left, "ms", "products ms", "exposed ms", "GB")
    return make_table(title, columns, rows, left, found[0].step.at.constants.source, wrapped=left)
