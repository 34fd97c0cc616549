"""bench=tune tune=compile: compiles the cost model's best candidates; writes a table and a plot."""

import dataclasses
import functools
import importlib.metadata
import time
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.comparison import duration
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.compiler import tpu_slice_devices
from mstrain.display.tables import make_table, write_csv
from mstrain.json_files import write_json
from mstrain.mesh import fit_to_devices
from mstrain.models.config import ModelConfig
from mstrain.planner.search import rank_meshes
from mstrain.program.dtype import dtype_on
from mstrain.program.memory import GIB
from mstrain.tuning.cache import find_result, result_file
from mstrain.tuning.compiled import Candidate, TuningResult, TuningTask, compile_candidate, why_slower


def refine_all(config: BenchmarkConfig, console: Console) -> int:
    """Tunes every model, from the cache if possible; returns 1 if no candidate of a model fits."""
    assert config.tpu_slice is not None, "tune=compile needs target="
    tpu_slice_devices(config.tpu_slice)  # before JAX initializes its backends, because it silences the compiler's log
    fitting = True
    for model in config.model_configs:
        task, begin = make_task(config, model), time.monotonic()

        def say(text: str, begin: float = begin) -> None:
            console.print(f"{duration(time.monotonic() - begin)}  {text}", soft_wrap=True)

        attempt = functools.partial(compile_candidate, task)
        with console.status(f"Compiling candidates for {model.name}"):
            result, kept = find_result(task, attempt, say)
        console.print(to_table(task, result), width=max(console.width, 120))
        fitting = fitting and result.best is not None
        if best := result.best:
            console.print(f"[bold]{model.name}[/]: type mesh={best.mesh} parallel.slices={best.slices}")
            where = "Found in" if kept else "The next call reads it from"
            console.print(where, result_file(task), soft_wrap=True)
        console.print("Written:", *write(task, result, Path(config.run_dir)), soft_wrap=True)
    return 0 if fitting else 1


def make_task(config: BenchmarkConfig, model: ModelConfig) -> TuningTask:
    """The tuning task of one model."""
    tpu_slice = config.tpu_slice
    assert tpu_slice is not None, "tune=compile needs target="
    slices = str(config.one_slice_count or "auto")
    parallel = dataclasses.replace(config.parallel("meshslice"), slices=slices)
    step = config.step_config(model, config.sequences(tpu_slice.devices), parallel, dtype_on("tpu", config.dtype))
    task = TuningTask(step, tpu_slice)
    return dataclasses.replace(task, meshes=_meshes(config, task))


def _meshes(config: BenchmarkConfig, task: TuningTask) -> tuple[str, ...]:
    if config.meshes == "auto":
        return ()
    if config.meshes != "all":
        return tuple(str(fit_to_devices(shape, task.tpu_slice.devices)) for shape in config.mesh_shapes)
    alone = dataclasses.replace(task.request, fixed=dataclasses.replace(task.request.fixed, data=1, pipeline=1))
    return tuple(str(costed.shape) for costed in rank_meshes(alone))


def basis(task: TuningTask) -> str:
    """The source of the figures, for the title of the table and the files."""
    q, tpu_slice = task.step, task.tpu_slice
    keys = {
        "accumulate": q.accumulate, "remat": q.remat, "shard": q.shard, "precision": q.products.products,
        "travel": q.products.travel,
    }  # fmt: skip
    given = ", ".join(f"{key}={value}" for key, value in keys.items() if value not in ("none", "bf16", 1))
    return (
        f"Predicted for {tpu_slice.name} ({tpu_slice.devices} devices) from training steps of {q.model.name} "
        f"({q.model.layers} layers, batch {q.batch} x {q.seq}{given and ', '}{given}) "
        f"compiled by libtpu {importlib.metadata.version('libtpu')}, not run"
    )


def to_table(task: TuningTask, result: TuningResult) -> Table:
    """The table for a terminal, with the cost model's time of the products and the time of the compiled step."""
    rows, texts = [], ("mesh", "slices", "plan", "why not")
    for candidate in result.candidates:
        share = "n/a"
        if candidate.seconds is not None and candidate.exposed is not None:
            share = f"{candidate.exposed / candidate.seconds:.1%}"
        numbers = [
            _cell(candidate.model_seconds, 1e3), _cell(candidate.seconds, 1e3), share, _cell(candidate.gemm, 1e3),
            _cell(candidate.move, 1e3), _cell(candidate.memory, 1 / GIB),
        ]  # fmt: skip
        rows.append((candidate.mesh, candidate.slices, candidate.plan, *numbers, _why(candidate, result)))
    columns = (*texts[:3], "model ms", "ms", "exposed", "products", "copies", "GiB", texts[3])
    caption = "model ms: the products by the cost model; ms: the whole step, of which products and copies"
    return make_table(basis(task), columns, rows, texts, caption, wrapped=texts[2:])


def _cell(value: float | None, scale: float) -> str:
    return "n/a" if value is None else f"{scale * value:,.1f}"


def _why(candidate: Candidate, result: TuningResult) -> str:
    return why_slower(candidate, result.best) if result.best else candidate.problem


def write(task: TuningTask, result: TuningResult, folder: Path) -> list[Path]:
    """Writes tune_compiled_MODEL.json, .csv and .png to `folder`, in SI units; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(candidate) | {"why": _why(candidate, result)} for candidate in result.candidates]
    stem = folder / f"tune_compiled_{task.step.model.name}"
    paths = [stem.with_suffix(suffix) for suffix in (".json", ".csv", ".png")]
    document = {"kind": "predicted", "source": basis(task), "candidates": rows}
    write_json(document, paths[0])
    write_csv(rows, paths[1])
    plot(task, result, paths[2])
    return paths


def plot(task: TuningTask, result: TuningResult, path: Path) -> None:
    """Plots bars of the compiled step by part and a mark for the cost model's time of the products."""
    candidates = [candidate for candidate in result.candidates if candidate.seconds]
    figure = Figure(figsize=(9, 1.8 + 0.4 * len(candidates)), layout="constrained")
    axes = figure.subplots()
    places, left = range(len(candidates)), [0.0] * len(candidates)
    for part, name in (("gemm", "products"), ("kernel", "kernels"), ("move", "copies"), ("rest", "rest"),
                       ("exposed", "exposed communication")):  # fmt: skip
        widths = [1e3 * getattr(candidate, part) for candidate in candidates]
        axes.barh(places, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    known = [(1e3 * t.model_seconds, i) for i, t in enumerate(candidates) if t.model_seconds]
    if known:
        axes.plot(*zip(*known, strict=True), "k|", markersize=16, label="cost model, products alone")
    labels = [f"{t.mesh} slices={t.slices}" + (" (does not fit)" if t.problem else "") for t in candidates]
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step on one device")
    axes.set_title(basis(task), fontsize=8, wrap=True)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
