"""The tuner's answer for a model and a machine, and why every other candidate lost."""

from pathlib import Path

from rich.console import Console

from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.hardware import TpuSlice
from mstrain.hardware.constants import constants_for, load_constants
from mstrain.mesh import MeshShape
from mstrain.models.auto import projections
from mstrain.models.config import ModelConfig
from mstrain.parallel.tune import tune
from mstrain.parallel.tuning_result import Tuning
from mstrain.planner.meshes import best_meshes
from mstrain.planner.tuning_report import explain, plot, to_csv, to_json

DEFAULT_DEVICES = 8  # of the emulated mesh


def best_mesh(model: ModelConfig, config: BenchmarkConfig, tpu_slice: TpuSlice) -> MeshShape:
    """The mesh that the cost model likes best on a slice, without data parallelism, among those on which
    MeshSlice's plan is legal (the first algorithm's, where MeshSlice is not compared).
    """
    names = config.algorithm_names
    parallel = config.parallel("meshslice" if "meshslice" in names else names[0])
    batch = config.batch or tpu_slice.devices * config.accumulate
    found = best_meshes(parallel, model, batch // config.accumulate, config.seq, tpu_slice.devices, tpu_slice)
    alone = [candidate.shape for candidate in found if candidate.shape.data == 1]
    if not alone:
        raise ValueError(
            f"meshes=auto: {model.name} with batch={batch} has no legal mesh on {tpu_slice.name} without copies "
            f"beside each other. Type meshes={found[0].shape}, or another batch=."
        )
    return alone[0]


def tune_model(model: ModelConfig, config: BenchmarkConfig, tpu_slice: TpuSlice | None) -> Tuning:
    """Tunes the products of a model for a slice, or for as many emulated CPU devices as meshes= has."""
    shapes = None if config.meshes in ("auto", "all") else config.mesh_shapes
    if shapes and len({(shape.data, shape.devices) for shape in shapes}) > 1:
        raise ValueError("bench=tune compares meshes of equal size. Type meshes= with as many devices each.")
    copies = shapes[0].data if shapes else 1
    devices = shapes[0].devices if shapes else tpu_slice.devices if tpu_slice else DEFAULT_DEVICES
    if tpu_slice and devices != tpu_slice.devices:
        raise ValueError(f"{tpu_slice.name} has {tpu_slice.devices} devices, not {devices}. Type meshes= to fill it.")
    constants = load_constants(config.constants) if config.constants else _constants(tpu_slice)
    tokens = (config.batch or devices) * config.seq
    if tokens % copies:
        raise ValueError(f"{tokens} tokens do not divide over {copies} copies. Type another batch=.")
    meshes = [(shape.row, shape.col) for shape in shapes] if shapes else tpu_slice
    return tune(
        projections(model, model.layers), tokens // copies, devices // copies, constants, meshes=meshes,
        slices=config.one_slice_count, dataflow=config.dataflow,
    )  # fmt: skip


def _constants(tpu_slice: TpuSlice | None):
    return constants_for(tpu_slice) if tpu_slice else load_constants("cpu_emulated")


def explain_all(config: BenchmarkConfig, console: Console) -> int:
    """Prints the table of candidates for every model; leaves it as JSON, CSV and picture in run_dir."""
    folder = Path(config.run_dir)
    for model in config.model_configs:
        tuning = tune_model(model, config, config.tpu_slice)
        folder.mkdir(parents=True, exist_ok=True)
        console.print(explain(tuning), width=max(console.width, 120))  # numbers are cut in less
        best = " ".join(f"{name} {flow} S={tuning.slices[name]};" for name, flow in tuning.dataflows.items())
        console.print(f"[bold]{model.name}[/]: mesh {'x'.join(map(str, tuning.mesh))}, {best.rstrip(';')}")
        for rows, cols, why in tuning.rejected:
            console.print(f"  not {rows}x{cols}: {why}")
        stem = folder / f"tune_{model.name}"
        stem.with_suffix(".json").write_text(to_json(tuning))
        stem.with_suffix(".csv").write_text(to_csv(tuning))
        plot(tuning, stem.with_suffix(".png"))
        share = tuning.best.exposed / tuning.best.seconds
        console.print(
            f"By the cost model, not measured: {share:.1%} of these products' time is exposed communication. "
            f"Written: {stem}.json .csv .png", soft_wrap=True,
        )  # fmt: skip
    return 0
