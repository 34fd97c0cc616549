"""Results of tune=compile on disk, so that a task is compiled once: one JSON file each.

A search that ends early, by Ctrl-C or a preemption, leaves the candidates that it finished; the next one
continues after them.
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
from rich.console import Console

import mstrain
from mstrain.json_files import replace_text
from mstrain.mesh import MeshShape
from mstrain.tuning.compiled import Candidate, Place, TuningResult, TuningTask, compile_candidate, ranked, refine

FOLDER = Path("~/.cache/mstrain/tuned")
# What decides which program is compiled and how its schedule is read.
CODE = (
    "compiler", "gemm", "hardware", "layers", "mesh.py", "models", "parallel", "planner", "program", "tuning",
)  # fmt: skip


def find_result(
    task: TuningTask, attempt: Callable[[MeshShape, str], Candidate], say: Callable[[str], None], folder: Path = FOLDER
) -> tuple[TuningResult, bool]:
    """The result, and whether all of it came from `folder`.

    Otherwise the candidates that are not there are tried with `attempt(mesh, slices)`; `say` gets a line of
    each. A candidate is kept as soon as it is done, and the result if something fits.

    Raises ValueError when no mesh is legal.
    """
    path, wanted = result_file(task, folder), identity(task)
    candidates, complete = _load(path, wanted)
    if complete:
        return ranked(candidates), True
    found = {(candidate.mesh, candidate.slices): candidate for candidate in candidates}
    if found:
        say(f"resumes after {len(found)} finished candidate{'s' * (len(found) > 1)}, found in {path}")

    def run(shape: MeshShape, slices: str) -> Candidate:
        if candidate := found.get((str(shape), slices)):
            return candidate
        candidates.append(attempt(shape, slices))
        _save(path, wanted, candidates)
        say(summarise(candidates[-1]))
        return candidates[-1]

    result = refine(task, run)
    if result.best is not None:
        _save(path, wanted, result.candidates, complete=True)
    else:  # not kept: a compiler that failed may succeed the next time
        with contextlib.suppress(OSError):
            path.unlink()
    return result, False


def choose_by_compiling(task: TuningTask, place: Place, console: Console) -> Candidate:
    """The candidate that tune=compile chooses, from the cache or compiled on `place`; `console` shows progress.

    Raises ValueError when nothing is legal or fits.
    """

    def say(text: str) -> None:
        console.print("[bold]Tune[/]  ", text, soft_wrap=True)

    attempt = functools.partial(compile_candidate, task, place=place)
    with console.status("Compiling the cost model's best candidates"):
        result, kept = find_result(task, attempt, say)
    best = result.chosen()
    source = f"found in {result_file(task)}" if kept else f"the fastest of {len(result.candidates)} schedules"
    console.print(f"[bold]Tune[/]   mesh={best.mesh} parallel.slices={best.slices}, {source}", soft_wrap=True)
    return best


def summarise(candidate: Candidate) -> str:
    what = f"{candidate.mesh} slices={candidate.slices} ({candidate.plan})"
    if candidate.problem:
        return f"{what}: {candidate.problem}"
    assert candidate.seconds is not None and candidate.exposed is not None
    exposed = candidate.exposed / candidate.seconds
    return f"{what}: {1e3 * candidate.seconds:,.1f} ms, {exposed:.1%} exposed communication"


def result_file(task: TuningTask, folder: Path = FOLDER) -> Path:
    text = json.dumps(identity(task), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    tpu_slice = task.tpu_slice.topology_name.replace(":", "_")
    return folder.expanduser() / f"{task.step.model.name}-{tpu_slice}-{digest}.json"


def identity(task: TuningTask) -> dict:
    """Everything that a result depends on: the task, the compiler's versions and mstrain's code."""
    fields = dataclasses.asdict(dataclasses.replace(task, tpu_slice=None))
    fields |= {"tpu_slice": task.tpu_slice.topology_name, "slices": task.tpu_slice.count, "meshes": list(task.meshes)}
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


def _load(path: Path, wanted: dict) -> tuple[list[Candidate], bool]:
    """The candidates in a file, and whether they are a whole result.

    No candidates from no file, a damaged one and one of another task.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        candidates = [Candidate(**candidate) for candidate in document["candidates"]]
        complete = document["complete"] and ranked(candidates).best is not None
        return (candidates, complete) if document["task"] == wanted else ([], False)
    except (OSError, ValueError, KeyError, TypeError):
        return [], False


def _save(path: Path, task: dict, candidates: Sequence[Candidate], complete: bool = False) -> None:
    rows = [dataclasses.asdict(candidate) for candidate in candidates]
    document = {"task": task, "complete": complete, "candidates": rows}
    with contextlib.suppress(OSError):  # without a writable folder the next run repeats the work
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(document, indent=1) + "\n")
