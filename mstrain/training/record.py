"""Writes and reads the files in run_dir that describe the run, so that a copy of the folder is enough to resume it.

`run.json` is the record that a resume is compared with; every checkpoint has a copy of it. `config.yaml` is the
resolved configuration for people and other programs. `tokenizer.json` is the tokenizer. `history.jsonl` has one line
per attempt and is never rewritten.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import yaml
from etils import epath
from jax.sharding import Mesh

import mstrain
from mstrain.data import DataConfig
from mstrain.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_file
from mstrain.mesh import shape_of
from mstrain.models.config import ModelConfig
from mstrain.models.description import describe_plan
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import ModelPlan
from mstrain.program.dtype import dtype_on
from mstrain.training import files, json_lines
from mstrain.training.best_effort import BestEffort
from mstrain.training.config import RunConfig
from mstrain.training.identity import CONTENT, KEPT, ORIGINS, Record, class_of, differences, flat, recorded_keys
from mstrain.training.reporter import METRICS
from mstrain.training.run import Run

RUN, CONFIG, HISTORY = "run.json", "config.yaml", "history.jsonl"
FORMAT = 1  # of run.json; a reader refuses a higher one
LARGEST = 2**20  # bytes of a run.json that is read
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
# Keys that may change and that `run_dir=` alone takes from the record all the same; others are of a machine or command.
CONTINUED = ("model.name", "checkpoint", "eval", "guard", "check_replicas", "watchdog", "log_every")
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # C: OmegaConf's own in Python takes 0.1 s at every start
DEFAULTS = flat(RunConfig(ModelConfig(), DataConfig(), ParallelConfig()))


def resolved_config(run: Run) -> RunConfig:
    """The configuration with the values chosen for `auto` and null."""
    plan, config = run.module.plan, run.config
    counts = _slice_counts(plan)
    parallel = dataclasses.replace(config.parallel, slices=str(counts.pop())) if len(counts) == 1 else config.parallel
    model, dtype = run.module.model, dtype_name(jnp.dtype(run.module.dtype))
    return dataclasses.replace(config, model=model, mesh=str(shape_of(plan.mesh)), parallel=parallel, dtype=dtype)


def dtype_name(dtype) -> str:
    """The value of `dtype=` for a dtype."""
    return next(name for name in ("f32", "bf16") if jnp.dtype(dtype_on("cpu", name)) == dtype)


def record_of(run: Run) -> Record:
    """The record of a run that is prepared."""
    tokenizer = run.corpus.tokenizer
    digests = {"data": run.corpus.digest, "tokenizer": tokenizer.digest if tokenizer else None}
    return Record(recorded_keys(resolved_config(run)), digests)


def to_json(record: Record) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(record)}


def from_json(document: Any, place: str) -> Record:
    """A record from the content of the file `place`. Raises ValueError for another format."""
    if not isinstance(document, dict) or type(document.get("format")) is not int:
        raise ValueError(f"{place} is not a run record of mstrain. {_REMEDY}")
    if document["format"] > FORMAT:
        raise ValueError(
            f"{place} was written by a newer mstrain (format {document['format']}, this one reads {FORMAT}). "
            "Update mstrain, or type another run_dir=."
        )
    config, digests = document.get("config"), document.get("digests")
    if isinstance(config, dict) and isinstance(digests, dict):
        plain = all(isinstance(value, str | int | float | bool | list | None) for value in config.values())
        if plain and all(isinstance(value, str | None) for value in digests.values()):
            return Record(config, digests)
    raise ValueError(f"{place} is damaged: it has no configuration of a run. {_REMEDY}")


_REMEDY = "Every checkpoint has a copy: delete the file and type the same command, or type another run_dir=."


def read(directory: Path) -> Record | None:
    """The record of the run in `directory`: run.json, or else the newest checkpoint's; None when there is neither.

    Raises ValueError when run.json is not a record that this version reads.
    """
    path = directory / RUN
    if os.path.lexists(path):
        return from_json(_parse(path), str(path))
    for step in checkpoint_steps(directory):
        place = epath.Path(directory) / "checkpoints" / str(step) / "facts"
        with contextlib.suppress(Exception):  # a damaged checkpoint is reported when it is restored
            facts = ocp.JsonCheckpointHandler().restore(place)
            return from_json(facts["record"], str(place))
    return None


def recorded_overrides(arguments: list[str]) -> list[str]:
    """Arguments from the record in `run_dir=`, so that `run_dir=` alone resumes a run.

    Empty if the command names keys of the run other than those in `allow=`. Raises ValueError for a record that cannot
    be read or written as arguments.
    """
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    allowed = set(given.get("allow", "").strip("'\"").split())
    new = [key for key in given if class_of(key) == KEPT and not {key, key.partition(".")[0]} & allowed]
    if new or "data" in given or not given.get("run_dir"):
        return []
    directory = Path(given["run_dir"].strip("'\""))
    known = read(directory)
    values = known.config if known else {}
    taken = {key: value for key, value in values.items() if key in DEFAULTS and key not in given and _is_taken(key)}
    return [f"{key}={argument_of(key, value, directory)}" for key, value in taken.items()]


def _is_taken(key: str) -> bool:
    of_run = key in CONTINUED or key.partition(".")[0] in CONTINUED or class_of(key) in (KEPT, CONTENT)
    return of_run and key not in ORIGINS


def argument_of(key: str, value: Any, directory: Path) -> str:
    """A value, which a file in `directory` has for `key`, in the syntax of the command line.

    Raises ValueError for text that cannot be written there.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    if set(value) & set("\\\"\n'") or "${" in value:
        raise ValueError(f"{directory}: {key}={value!r} cannot be written as an argument. Type {key}= yourself.")
    return f"'{value}'"


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a run directory, the newest first, whole or damaged."""
    with contextlib.suppress(OSError):
        names = [path.name for path in (directory / "checkpoints").iterdir()]
        return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)
    return []


def begin_attempt(run: Run, done: int, observers: BestEffort) -> None:
    """Writes the record and adds this attempt, which starts after step `done`, to the history.

    Called on process 0 once a checkpoint exists. Raises ValueError when a changed record cannot be written. `observers`
    write the other files.
    """
    directory, now = Path(run.config.run_dir), record_of(run)
    before = read(directory) if (directory / RUN).exists() else None
    now = _with_origin(now, before)
    try:
        if before != now:
            files.replace(directory / RUN, (json.dumps(to_json(now), indent=1) + "\n").encode())
        if run.corpus.tokenizer:
            _copy_tokenizer(run.corpus.tokenizer, directory)
    except OSError as error:
        raise ValueError(
            f"Cannot write the record of the run into {directory} ({error.strerror or error}). Make room, or type "
            "another run_dir=."
        ) from None
    observers.do(CONFIG, files.replace, directory / CONFIG, config_yaml(run).encode())
    attempt = json.dumps(_attempt(run, done, before, now)).encode() + b"\n"
    observers.do(HISTORY, files.append, directory / HISTORY, attempt)


def missing_metrics(directory: Path, done: int) -> str:
    """Steps up to `done` that metrics.jsonl lacks, by the longest `log_every` of any attempt; empty when none."""
    configs = [line.get("config") for line in json_lines.read(directory / HISTORY)]
    noted = [config.get("log_every") for config in configs if isinstance(config, dict)]
    return json_lines.missing(directory / METRICS, done, max([1, *(every for every in noted if type(every) is int)]))


def config_yaml(run: Run) -> str:
    """The resolved configuration, and under `resolved` the facts that have no key."""
    plan = run.module.plan
    resolved = {
        "plan": describe_plan(plan).split(" | "),
        "devices": _devices(plan.mesh),
        "processes": run.job.processes,
        "digests": record_of(run).digests,
        "revisions": run.corpus.revisions,
    }
    values = dataclasses.asdict(resolved_config(run))
    return yaml.dump({**values, "resolved": resolved}, Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def _devices(mesh: Mesh) -> str:
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"


def _parse(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is not a file. Remove it, or type another run_dir=.")
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(LARGEST))
    except OSError as error:
        raise ValueError(f"Cannot read {path} ({error.strerror}). Type another run_dir=, or repair the file.") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: not JSON, or truncated. {_REMEDY}") from None


def _with_origin(now: Record, before: Record | None) -> Record:
    """Keeps init and init_from of the record, which a resume may omit."""
    if before is None:
        return now
    return dataclasses.replace(now, config=now.config | {
        key: before.config.get(key) for key in ORIGINS if now.config.get(key) is None and key in before.config
    })  # fmt: skip


def _copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Puts the tokenizer's files into `directory`, unless the same tokenizer is there or it needs no file."""
    with contextlib.suppress(ValueError):
        if (path := tokenizer_file(directory)) and load_tokenizer(str(path)).digest == tokenizer.digest:
            return
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tokenizer-") as folder:
        tokenizer.save(Path(folder))
        for made in Path(folder).iterdir():
            made.replace(directory / made.name)


def _attempt(run: Run, done: int, before: Record | None, now: Record) -> dict[str, Any]:
    """One line of history.jsonl."""
    plan, changed = run.module.plan, differences(before, now, DEFAULTS) if before else []
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "after_step": done,
        "command": sys.argv,
        "changed": {difference.name: [difference.before, difference.now] for difference in changed},
        "mesh": str(shape_of(plan.mesh)),
        "plan": describe_plan(plan),
        "devices": _devices(plan.mesh),
        "hosts": [run.job.names.get(process) for process in range(run.job.processes)],
        "revisions": run.corpus.revisions,
        "commit": _commit(),
        "versions": _versions(),
        "config": now.config,
    }


def _versions() -> dict[str, str]:
    found = {"mstrain": mstrain.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    """The commit of a checkout, `-dirty` when files differ from it; None for an installed package."""
    root = Path(mstrain.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    words = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run([*words, "--abbrev=40"], capture_output=True, text=True, timeout=20, check=True).stdout
        return shown.strip() or None
    return None


def _slice_counts(plan: ModelPlan) -> set[int]:
    """Slice counts of all products of the model's blocks that are sliced."""
    products = [product for block, _ in plan.every_group for product in block.products]
    return {product.slices for product in products if product.kind.sliced}
