"""Answers of tune=compile on disk, so that a question is compiled once: one JSON file each.

A search that ends early, by Ctrl-C or a preemption, leaves the trials that it finished; the next one goes on
after them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

import mstrain
from mstrain.hardware import TpuSlice
from mstrain.mesh import MeshShape, fit_to_devices, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.planner.compiled import Answer, Place, Question, Trial, compile_candidate, ranked, refine
from mstrain.training.config import RunConfig

FOLDER = Path("~/.cache/mstrain/tuned")
# What decides which program is compiled and how its schedule is read.
CODE = (
    "compiler", "gemm", "hardware", "layers", "mesh.py", "models", "parallel", "planner", "program",
)  # fmt: skip


def find_answer(
    question: Question,
    attempt: Callable[[MeshShape, str], Trial],
    say: Callable[[str], None],
    folder: Path = FOLDER,
) -> tuple[Answer, bool]:
    """The answer, and whether all of it came from `folder`.

    Otherwise the candidates that are not there are tried with `attempt(mesh, slices)`; `say` hears a line of
    each. A trial is kept as soon as it is done, and the answer if something fits.

    Raises ValueError when no mesh is legal.
    """
    path, wanted = answer_file(question, folder), identity(question)
    trials, complete = _load(path, wanted)
    if complete:
        return ranked(trials), True
    found = {(trial.mesh, trial.slices): trial for trial in trials}
    if found:
        say(f"goes on after {len(found)} finished trial{'s' * (len(found) > 1)}, found in {path}")

    def run(shape: MeshShape, slices: str) -> Trial:
        if trial := found.get((str(shape), slices)):
            return trial
        trials.append(attempt(shape, slices))
        _save(path, wanted, trials)
        say(summarise(trials[-1]))
        return trials[-1]

    answer = refine(question, run)
    if answer.best is not None:
        _save(path, wanted, answer.trials, complete=True)
    else:  # to be asked again: a compiler that failed may not fail the next time
        with contextlib.suppress(OSError):
            path.unlink()
    return answer, False


def tuned(
    config: RunConfig, model: ModelConfig, tpu_slice: TpuSlice, dtype: jnp.dtype, place: Place, console: Console
) -> RunConfig:
    """`config` with the mesh and slice count that tune=compile chooses on `tpu_slice`; `console` hears of it.

    Raises ValueError when nothing is legal or fits.
    """
    meshes = () if config.mesh == "auto" else (str(fit_to_devices(parse_mesh(config.mesh), tpu_slice.devices)),)
    question = Question(
        model, config.parallel, tpu_slice, config.batch, config.seq, config.accumulate, jnp.dtype(dtype).name,
        config.remat, meshes,
    )  # fmt: skip

    def say(text: str) -> None:
        console.print("[bold]Tune[/]  ", text, soft_wrap=True)

    attempt = functools.partial(compile_candidate, question, place=place)
    with console.status("Compiling the cost model's best candidates"):
        answer, kept = find_answer(question, attempt, say)
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
    tpu_slice = question.tpu_slice.topology_name.replace(":", "_")
    return folder.expanduser() / f"{question.model.name}-{tpu_slice}-{digest}.json"


def identity(question: Question) -> dict:
    """Everything that an answer depends on: the question, the compiler's versions and mstrain's code."""
    fields = dataclasses.asdict(dataclasses.replace(question, tpu_slice=None))
    fields |= {"tpu_slice": question.tpu_slice.topology_name, "meshes": list(question.meshes)}
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


def _load(path: Path, wanted: dict) -> tuple[list[Trial], bool]:
    """The trials in a file, and whether they are a whole answer.

    No trials from no file, a damaged one and one that answers something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        trials = [Trial(**trial) for trial in document["trials"]]
        complete = document["complete"] and ranked(trials).best is not None
        return (trials, complete) if document["question"] == wanted else ([], False)
    except (OSError, ValueError, KeyError, TypeError):
        return [], False


def _save(path: Path, question: dict, trials: Sequence[Trial], complete: bool = False) -> None:
    rows = [dataclasses.asdict(trial) for trial in trials]
    document = {"question": question, "complete": complete, "trials": rows}
    part = path.with_suffix(".part")
    with contextlib.suppress(OSError):  # a folder that cannot be written costs the next run its time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
