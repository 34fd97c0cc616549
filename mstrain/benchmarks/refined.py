"""bench=tune tune=compile: the cost model's best candidates as compiled steps, in a table and a picture."""

import csv
import dataclasses
import functools
import importlib.metadata
import io
import json
import time
from pathlib import Path

import jax.numpy as jnp
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.comparison import duration
from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.compiler import tpu_slice_devices
from mstrain.mesh import fit_to_devices
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.planner.compiled import Answer, Question, Trial, compile_candidate, why_slower
from mstrain.planner.meshes import best_meshes
from mstrain.planner.tuning_cache import answer_file, find_answer
from mstrain.program.dtype import dtype_on
from mstrain.program.memory import GIB

COLUMNS = [*(field.name for field in dataclasses.fields(Trial)), "why"]


def refine_all(config: BenchmarkConfig, console: Console) -> int:
    """Answers the question for every model, if possible from the cache; returns 1 when one fits nowhere."""
    tpu_slice_devices(config.tpu_slice)  # before anything asks JAX for devices: the compiler is quiet only there
    fitting = True
    for model in config.model_configs:
        question, begin = make_question(config, model), time.monotonic()

        def say(text: str) -> None:
            console.print(f"{duration(time.monotonic() - begin)}  {text}", soft_wrap=True)

        attempt = functools.partial(compile_candidate, question)
        with console.status(f"Compiling candidates for {model.name}"):
            answer, kept = find_answer(question, attempt, say)
        console.print(to_table(question, answer), width=max(console.width, 120))
        fitting = fitting and answer.best is not None
        if best := answer.best:
            console.print(f"[bold]{model.name}[/]: type mesh={best.mesh} parallel.slices={best.slices}")
            where = "Found in" if kept else "The next call answers at once, from"
            console.print(where, answer_file(question), soft_wrap=True)
        console.print("Written:", *write(question, answer, Path(config.run_dir)), soft_wrap=True)
    return 0 if fitting else 1


def make_question(config: BenchmarkConfig, model: ModelConfig) -> Question:
    """What the command line asks of one model."""
    tpu_slice = config.tpu_slice
    slices = str(config.one_slice_count or "auto")
    parallel = dataclasses.replace(config.parallel("meshslice"), slices=slices)
    batch = config.batch or tpu_slice.devices * config.accumulate
    if batch % config.accumulate:
        raise ValueError(f"batch={batch} does not divide into accumulate={config.accumulate} microbatches.")
    meshes = _meshes(config, parallel, model, batch // config.accumulate)
    dtype = jnp.dtype(dtype_on("tpu", config.dtype)).name
    return Question(model, parallel, tpu_slice, batch, config.seq, config.accumulate, dtype, config.remat, meshes)


def _meshes(
    config: BenchmarkConfig, parallel: ParallelConfig, model: ModelConfig, microbatch: int
) -> tuple[str, ...]:
    tpu_slice = config.tpu_slice
    if config.meshes == "auto":
        return ()
    if config.meshes != "all":
        return tuple(str(fit_to_devices(shape, tpu_slice.devices)) for shape in config.mesh_shapes)
    found = best_meshes(parallel, model, microbatch, config.seq, tpu_slice.devices, tpu_slice)
    return tuple(str(candidate.shape) for candidate in found if candidate.shape.data == 1)


def basis(question: Question) -> str:
    """What the numbers are, for the head of every form of the table."""
    q = question
    return (
        f"Predicted for {q.tpu_slice.name} ({q.tpu_slice.devices} devices) from training steps of {q.model.name} "
        f"({q.model.layers} layers, batch {q.batch} x {q.seq}, accumulate={q.accumulate}, remat={q.remat}) "
        f"compiled by libtpu {importlib.metadata.version('libtpu')}, not run"
    )


def to_table(question: Question, answer: Answer) -> Table:
    """For a terminal; the cost model's time of the products beside the time of the compiled step."""
    table = Table(title=basis(question), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("mesh", "slices", "plan"):
        table.add_column(name, no_wrap=name != "plan")
    for name in ("model ms", "ms", "exposed", "products", "copies", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not")
    for trial in answer.trials:
        share = "n/a" if trial.seconds is None else f"{trial.exposed / trial.seconds:.1%}"
        numbers = [
            _cell(trial.model_seconds, 1e3), _cell(trial.seconds, 1e3), share, _cell(trial.gemm, 1e3),
            _cell(trial.move, 1e3), _cell(trial.memory, 1 / GIB),
        ]  # fmt: skip
        table.add_row(trial.mesh, trial.slices, trial.plan, *numbers, _why(trial, answer))
    table.caption = "model ms: the products by the cost model; ms: the whole step, of which products and copies"
    table.caption_justify = "left"
    return table


def _cell(value: float | None, scale: float) -> str:
    return "n/a" if value is None else f"{scale * value:,.1f}"


def _why(trial: Trial, answer: Answer) -> str:
    return why_slower(trial, answer.best) if answer.best else trial.problem


def write(question: Question, answer: Answer, folder: Path) -> list[Path]:
    """Leaves tune_compiled_MODEL.json, .csv and .png in `folder`; SI units."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(trial) | {"why": _why(trial, answer)} for trial in answer.trials]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    stem = folder / f"tune_compiled_{question.model.name}"
    paths = [stem.with_suffix(suffix) for suffix in (".json", ".csv", ".png")]
    document = {"kind": "predicted", "source": basis(question), "trials": rows}
    paths[0].write_text(json.dumps(document, indent=2) + "\n")
    paths[1].write_text(text.getvalue())
    plot(question, answer, paths[2])
    return paths


def plot(question: Question, answer: Answer, path: Path) -> None:
    """Bars of the compiled step by its parts, the cost model's prediction of the products as a mark."""
    trials = [trial for trial in answer.trials if trial.seconds]
    figure = Figure(figsize=(9, 1.8 + 0.4 * len(trials)), layout="constrained")
    axes = figure.subplots()
    places, left = range(len(trials)), [0.0] * len(trials)
    for part, name in (("gemm", "products"), ("kernel", "kernels"), ("move", "copies"), ("rest", "rest"),
                       ("exposed", "exposed communication")):  # fmt: skip
        widths = [1e3 * getattr(trial, part) for trial in trials]
        axes.barh(places, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    known = [(1e3 * t.model_seconds, i) for i, t in enumerate(trials) if t.model_seconds]
    if known:
        axes.plot(*zip(*known, strict=True), "k|", markersize=16, label="cost model, products alone")
    labels = [f"{t.mesh} slices={t.slices}" + (" (does not fit)" if t.problem else "") for t in trials]
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step on one device")
    axes.set_title(basis(question), fontsize=8, wrap=True)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
