"""Restores or creates the state that an attempt starts from, after comparing the configuration with the run's record.

Precedence: the newest undamaged checkpoint in `run_dir`, or a newer local one of the hosts; otherwise the parameters of
the run in `init_from` or of the Hugging Face folder `init`; otherwise random weights from `seed`. A damaged checkpoint
is moved away and the next older one is used. `check` compares the configuration before the corpus is read,
`check_resolved` compares everything before anything is compiled.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.markup import escape

from mstrain.checkpoints import manifest
from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.checkpoints.limits import seconds_allowed
from mstrain.checkpoints.local import LocalCheckpoints
from mstrain.data.tokenizers import load_tokenizer, tokenizer_file
from mstrain.job.job import Job
from mstrain.mesh import parse_mesh, shape_of
from mstrain.models.hub.folder import Folder
from mstrain.models.transformer import Transformer
from mstrain.program.dtype import dtype_on
from mstrain.program.step import State, first_state, init_state
from mstrain.training import record
from mstrain.training.config import RunConfig
from mstrain.training.identity import (
    LOST_STEPS,
    NO_RECORD,
    Record,
    differences,
    parse_allow,
    recorded_keys,
    refusal,
)
from mstrain.training.previous import DAMAGED, PreviousAttempts, inspect_run_dir, set_aside
from mstrain.training.run import Run

DEFINES_BATCHES = ("seed", "batch", "seq", "corpus")  # facts of a checkpoint
HUB = "hub"  # folder in run_dir: configuration and tokenizer of init=
FORMAT = 1  # of what a checkpoint holds; a reader refuses a higher one


def check(config: RunConfig, job: Job) -> PreviousAttempts:
    """Inspects run_dir and init_from before the corpus is read. Needs the devices, whose platform decides the dtype.

    Raises ValueError when the configuration is that of another run and `allow=` does not name the difference.
    """
    previous, allowed = inspect_run_dir(Path(config.run_dir), job), _allowed(config)
    now = _planned(config, previous)
    # The hosts may have newer local checkpoints.
    if previous.checkpoints or (previous.progress_files and config.checkpoint.local_dir):
        _compare(config.run_dir, previous.record, now, allowed)
        return previous
    previous.refuse_loss(config.run_dir, allowed)
    if config.init_from:
        _check_source(config, inspect_run_dir(Path(config.init_from), job), now)
    if config.init:
        Folder(config.init, config.model.mtp_layers).check()
        _check_tokenizer(config, previous)
    return previous


def check_resolved(run: Run, previous: PreviousAttempts, show: bool = True) -> None:
    """Compares all of the run, its data included, with the record; prints every difference that is allowed, if they
    are to `show`.
    """
    config, now, allowed = run.config, record.record_of(run), _allowed(run.config)
    if not previous.checkpoints:
        if config.init_from:
            _check_source(config, inspect_run_dir(Path(config.init_from), run.job), now)
        return
    _compare(config.run_dir, previous.record, now, allowed)
    if not show:
        return
    found = differences(previous.record, now, record.DEFAULTS) if previous.record else []
    for difference in found:
        run.console.print(f"[yellow]Resume:[/] {escape(str(difference))}")
    used = {name for difference in found for name in difference.covered_by}
    for name in sorted(name for name in allowed - used - {NO_RECORD} if not name.startswith(LOST_STEPS)):
        run.console.print(f"[yellow]Resume:[/] allow={name} has no effect: the record of the run has this value.")


def tokenizer_of(config: RunConfig, previous: PreviousAttempts) -> str:
    """The tokenizer= to load: the copy in run_dir if the run's own file is not on this machine."""
    copy = tokenizer_file(Path(config.run_dir))
    same = previous.record is not None and previous.record.config.get("tokenizer") == config.tokenizer
    built_in = config.tokenizer in ("bytes", "bpe") or config.data.source == "synthetic"
    present = Path(config.tokenizer).expanduser().exists()
    return str(copy) if same and not built_in and not present and copy else config.tokenizer


def finished_step(run: Run) -> int | None:
    """The newest checkpoint's step when it is the last one of the run and its files are undamaged; None otherwise."""
    directory = Path(run.config.run_dir) / "checkpoints"
    step = int(run.job.all_gather("newest step", str(max(record.checkpoint_steps(directory.parent), default=-1)))[0])
    return step if step >= run.config.steps and not _damage(run.job, directory, step) else None


def begin(run: Run, checkpoints: Checkpoints, local: LocalCheckpoints | None = None) -> tuple[State, int]:
    """The state to start from and its number of finished steps.

    Raises ValueError when there are checkpoints and none can be used.
    """
    steps, log = checkpoints.steps, run.console.print
    for step in steps:
        if local and (found := local.resume(above=step)):
            return _announce_local(run, local, *found)
        damage = _damage(run.job, checkpoints.directory, step)
        if not damage:
            if step == 0:
                _give_up_progress(run, inspect_run_dir(Path(run.config.run_dir), run.job), DAMAGED)
            if step != steps[0]:
                lost = f"{steps[0] - step} steps since the good checkpoint of step {step}"
                log(f"[yellow]Resume:[/] {lost} are repeated.")
            if local:
                local.drop_after(step)
            return _resume(run, checkpoints, step), step
        place = checkpoints.set_aside(step)
        run.job.barrier("damaged checkpoint set aside")
        checkpoints.reload()
        log(f"[yellow]Checkpoint {step} is damaged:[/] {'; '.join(damage[:3])}. It is now {place}.")
    if local and (found := local.resume(above=0)):
        return _announce_local(run, local, *found)
    _give_up_progress(run, inspect_run_dir(Path(run.config.run_dir), run.job))
    return new_state(run), 0


def new_state(run: Run) -> State:
    """Step 0: the parameters of init_from or init, or random ones from the seed."""
    if run.config.init_from:
        return _from_another(run)
    if run.config.init:
        return _from_folder(run, Folder(run.config.init, run.module.model.mtp_layers))
    return init_state(run.module, run.optimizer, run.config.seed)


def _announce_local(run: Run, local: LocalCheckpoints, state: State, step: int, lost: list[int]) -> tuple[State, int]:
    local.drop_after(step)
    copied = f"; replicas replace the shards that {', '.join(map(run.job.name, lost))} lost" if lost else ""
    run.console.print(
        f"[bold]Resume[/] after step {step} from the hosts' own {run.config.checkpoint.local_dir}{copied}"
    )
    return state, step


def _give_up_progress(run: Run, previous: PreviousAttempts, only: str | None = None) -> None:
    """Moves the files of earlier attempts away before a start at step 0, if `allow=` permits it.

    With `only`, does so only if that file is present: without damaged checkpoints, the run was killed at step 0.
    """
    if previous.progress_files and (only is None or only in previous.progress_files):
        previous.refuse_loss(run.config.run_dir, _allowed(run.config))
        if run.job.leads:
            place = set_aside(Path(run.config.run_dir))
            run.console.print(f"[yellow]Start:[/] the files of {previous.steps} lost steps are now in {place}.")


def facts(run: Run) -> dict:
    """The facts that a checkpoint stores about its run."""
    return {
        "format": FORMAT,
        "seed": run.config.seed,
        "batch": run.config.batch,
        "seq": run.config.seq,
        "corpus": run.corpus.digest,
        "record": record.to_json(record.record_of(run)),
        "mesh": str(shape_of(run.module.plan.mesh)),
        "processes": run.job.processes,
        "jax": jax.__version__,
    }


def _resume(run: Run, checkpoints: Checkpoints, step: int) -> State:
    before = checkpoints.facts(step)
    _check_format(before, run.config.run_dir)
    state = checkpoints.restore(step, run.module, run.optimizer)
    run.console.print(f"[bold]Resume[/] after step {step} of {run.config.run_dir}, saved on mesh {before.get('mesh')}")
    return state


def _allowed(config: RunConfig) -> set[str]:
    return parse_allow(config.allow, record.DEFAULTS)


def _planned(config: RunConfig, previous: PreviousAttempts) -> Record:
    """The part of the record that is known before the corpus is read."""
    dtype = record.dtype_name(dtype_on(jax.devices()[0].platform, config.dtype))
    mesh = config.mesh if config.mesh == "auto" else str(parse_mesh(config.mesh))
    keys = recorded_keys(dataclasses.replace(config, dtype=dtype, mesh=mesh))
    known = {key: value for key, value in keys.items() if value != "auto"}
    text = config.data.has_tokenizer(config.tokenizer) and config.tokenizer != "bpe"  # a bpe is trained on the corpus
    tokenizer = load_tokenizer(tokenizer_of(config, previous)).digest if text else None
    return Record(known, {"tokenizer": tokenizer})


def _compare(run_dir: str, before: Record | None, now: Record, allowed: set[str]) -> None:
    if before is None:
        if NO_RECORD not in allowed:
            raise ValueError(
                f"run_dir={run_dir} has checkpoints and no {record.RUN}, so they may belong to another "
                f"run. Type another run_dir=, or allow={NO_RECORD} if they are."
            )
        return
    found = differences(before, now, record.DEFAULTS)
    instead = (
        f"Keys that are not typed have their defaults here. Type run_dir={run_dir} alone to continue the recorded run, "
        f"or with the keys to change and allow= (such as run_dir={run_dir} steps=480 allow=steps): the others are then "
        "as recorded. Type the recorded values, type another run_dir= to start a new run"
    )
    if message := refusal(f"{run_dir}/{record.RUN}", found, allowed, instead):
        raise ValueError(message)


def _check_source(config: RunConfig, source: PreviousAttempts, now: Record) -> None:
    """Raises ValueError unless the model and tokenizer of init_from are those of this run."""
    allowed, place = _allowed(config), config.init_from
    if not source.checkpoints:
        raise ValueError(f"init_from={place} has no checkpoints. Type the run_dir of a run that has saved.")
    if source.record is None:
        if NO_RECORD not in allowed:
            raise ValueError(
                f"init_from={place} has no {record.RUN}, so its model is unknown. Type another run, "
                f"or allow={NO_RECORD} if its model and tokenizer are those of this run."
            )
        return
    found = differences(source.record, now, record.DEFAULTS)
    found = [difference for difference in found if difference.group in ("model", "tokenizer")]
    instead = "Type the recorded values, type another init_from="
    if message := refusal(f"{place}/{record.RUN}", found, allowed, instead):
        raise ValueError(message)


def _check_tokenizer(config: RunConfig, previous: PreviousAttempts) -> None:
    """Raises ValueError, before the corpus is tokenized, for a tokenizer that is not that of the model's folder or has
    more tokens than the model.
    """
    if not config.data.has_tokenizer(config.tokenizer):
        return
    file = tokenizer_file(Path(config.init or "").expanduser())
    if config.tokenizer == "bpe":
        if file:
            raise ValueError(
                f"tokenizer=bpe trains a tokenizer, but the model of init={config.init} has {file}. Remove tokenizer=."
            )
        return
    own, size = load_tokenizer(tokenizer_of(config, previous)), config.model.known_vocab_size
    if own.vocab_size > size:
        raise ValueError(
            f"tokenizer={config.tokenizer} has {own.vocab_size} tokens, and the model of init={config.init} has "
            f"{size}. Type the tokenizer= of the model."
        )
    if file and "tokenizer" not in _allowed(config) and load_tokenizer(str(file)).digest != own.digest:
        raise ValueError(
            f"tokenizer={config.tokenizer} is not the tokenizer of init={config.init}, with which the model was "
            "trained. Remove tokenizer=, or type allow=tokenizer to train the model on other tokens."
        )


def _damage(job: Job, directory: Path, step: int) -> list[str]:
    """Problems of checkpoint `step` in the folder `directory`; each process reads its share of the files."""
    own = manifest.problems(directory / str(step), job.process, job.processes)
    seconds = seconds_allowed(manifest.size(directory / str(step)) / job.processes, None)
    return [line for text in job.all_gather("damage", "\n".join(own), seconds) for line in text.split("\n") if line]


def _from_another(run: Run) -> State:
    source = run.config.init_from
    assert source is not None
    step, params = newest_parameters(run.job, run.module, f"init_from={source}", Path(source))
    run.console.print(f"[bold]Begin[/] with the parameters of step {step} of {source}")
    return first_state(run.module, run.optimizer, params)


def _from_folder(run: Run, folder: Folder) -> State:
    """The first state with the weights of a Hugging Face folder, whose small files `run_dir` keeps for an export."""
    params = folder.parameters(run.module)
    run.console.print(f"[bold]Begin[/] with the weights of {folder.path}, a {folder.family.model_type}")
    if folder.left_out:
        run.console.print(folder.left_out)
    if run.job.leads:
        folder.keep_small_files(Path(run.config.run_dir) / HUB)
    return first_state(run.module, run.optimizer, params)


def newest_parameters(job: Job, module: Transformer, given: str, directory: Path, only: int | None = None):
    """(step, parameters laid out for `module`) of the newest checkpoint in `directory` that can be read, or of step
    `only`.

    Raises ValueError, which names the key `given`, if it is missing.
    """
    with _newest(job, given, directory, only) as (checkpoints, step):
        return step, checkpoints.restore_parameters(step, module)


def newest_state(run: Run) -> State:
    """The state of the newest checkpoint in run_dir that can be read; nothing is moved or written.

    Raises ValueError without one.
    """
    directory = run.config.run_dir
    with _newest(run.job, f"run_dir={directory}", Path(directory)) as (checkpoints, step):
        return checkpoints.restore(step, run.module, run.optimizer)


@contextlib.contextmanager
def _newest(job: Job, given: str, directory: Path, only: int | None = None) -> Iterator[tuple[Checkpoints, int]]:
    """The checkpoints in `directory`, to be read only, and the newest that is not damaged, or step `only`.

    Prints newer ones that are damaged, with the reason, on standard error.
    """
    others = Checkpoints(directory / "checkpoints", keep=None)
    try:
        if only is not None and only not in others.steps:
            there = ", ".join(map(str, sorted(others.steps))) or "none"
            raise ValueError(f"{given} has no checkpoint of step={only}. Type one of: {there}.")
        step, damaged = None, []
        for step in others.steps if only is None else [only]:
            if not (damage := _damage(job, others.directory, step)):
                break
            damaged.append(f"checkpoint {step} of {given} is damaged: {'; '.join(damage[:3])}")
        else:
            if only is not None:
                raise ValueError(f"{damaged[0]}. Remove step= to read the newest good checkpoint.")
            raise ValueError("\n".join([*damaged, f"{given} has no checkpoint that can be read. Type another run."]))
        if damaged and job.leads:
            print("\n".join([*damaged, f"Checkpoint {step} is read instead."]), file=sys.stderr)
        _check_format(others.facts(step), str(directory))
        yield others, step
    finally:
        others.close()


def _check_format(before: dict, directory: str) -> None:
    version = before.get("format", FORMAT) if isinstance(before, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"The checkpoints of {directory} are not mstrain's. Type another run_dir=.")
    if version > FORMAT:
        raise ValueError(
            f"The checkpoints of {directory} were written by a newer mstrain (format {version}, this one "
            f"reads {FORMAT}). Update mstrain, or type another run_dir=."
        )
