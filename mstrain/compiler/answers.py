"""Answers of tune=compile on disk, so that a question is compiled once: one JSON file each."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

import mstrain
from mstrain.compiler.refine import Answer, Place, Question, Trial, compile_candidate, refine
from mstrain.config import RunConfig
from mstrain.hardware import Slice
from mstrain.mesh import fit_to_devices, parse_mesh
from mstrain.models.config import ModelConfig

FOLDER = Path("~/.cache/mstrain/tuned")
# What decides which program is compiled and how its schedule is read.
CODE = (
    "compiler", "gemm", "hardware", "layers", "models", "tuning", "training/step.py", "training/optimizer.py",
)  # fmt: skip


def find_answer(
    question: Question, refine: Callable[[], Answer], folder: Path = FOLDER
) -> tuple[Answer, bool]:
    """The answer, and whether it came from `folder`.

    Otherwise `refine()` gives it, and it is kept if something fits.
    """
    path = answer_file(question, folder)
    if answer := _load(path, identity(question)):
        return answer, True
    answer = refine()
    if answer.best is not None:
        _save(path, identity(question), answer)
    return answer, False


def tuned(
    config: RunConfig, model: ModelConfig, slice: Slice, dtype: jnp.dtype, place: Place, console: Console
) -> RunConfig:
    """`config` with the mesh and slice count that tune=compile chooses on `slice`; `console` hears of it.

    Raises ValueError when nothing is legal or fits.
    """
    meshes = () if config.mesh == "auto" else (str(fit_to_devices(parse_mesh(config.mesh), slice.devices)),)
    question = Question(
        model, config.parallel, slice, config.batch, config.seq, config.accumulate, jnp.dtype(dtype).name,
        config.remat, meshes,
    )  # fmt: skip

    def told(trial: Trial) -> None:
        console.print("[bold]Tune[/]  ", summarise(trial), soft_wrap=True)

    def ask() -> Answer:
        with console.status("Compiling the cost model's best candidates"):
            attempt = functools.partial(compile_candidate, question, place=place)
            return refine(question, attempt, told)

    answer, kept = find_answer(question, ask)
    best = answer.chosen()
    source = f"found in {answer_file(question)}" if kept else f"the fastest of {len(answer.trials)} schedules"
    console.print(f"[bold]Tune[/]   mesh={best.mesh} parallel.slices={best.slices}, {source}", soft_wrap=True)
    parallel = dataclasses.replace(config.parallel, slices=best.slices)
    return dataclasses.replace(config, tune="model", mesh=best.mesh, parallel=parallel)


def summarise(trial: Trial) -> str:
    """One line for those who wait."""
    what = f"{trial.mesh} slices={trial.slices} ({trial.plan})"
    if trial.problem:
        return f"{what}: {trial.problem}"
    exposed = trial.exposed / trial.seconds
    return f"{what}: {1e3 * trial.seconds:,.1f} ms, {exposed:.1%} exposed communication"


def answer_file(question: Question, folder: Path = FOLDER) -> Path:
    """Where the answer to a question is kept."""
    text = json.dumps(identity(question), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    slice = question.slice.topology_name.replace(":", "_")
    return folder.expanduser() / f"{question.model.name}-{slice}-{digest}.json"


def identity(question: Question) -> dict:
    """Everything that an answer depends on: the question, the compiler's versions and mstrain's code."""
    fields = dataclasses.asdict(dataclasses.replace(question, slice=None))
    fields |= {"slice": question.slice.topology_name, "meshes": list(question.meshes)}
    return {**fields, "jax": jax.__version__, "libtpu": _version("libtpu"), "code": code_digest()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def code_digest() -> str:
    """Of the files named in CODE."""
    root, digest = Path(mstrain.__file__).parent, hashlib.sha256()
    for entry in CODE:
        path = root / entry
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*.*") if f.suffix != ".pyc")
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _load(path: Path, wanted: dict) -> Answer | None:
    """The answer in a file; None for no file, a damaged one and one that answers something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["question"] != wanted:
            return None
        answer = Answer(tuple(Trial(**trial) for trial in document["trials"]))
        return answer if answer.best else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(path: Path, question: dict, answer: Answer) -> None:
    document = {"question": question, "trials": [dataclasses.asdict(trial) for trial in answer.trials]}
    part = path.with_suffix(".part")
    with contextlib.suppress(OSError):  # a folder that cannot be written costs the next run its time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
