"""One attempt of a run: create or restore its state, train to the last step or until a signal, and summarize."""

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.markup import escape

from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.checkpoints.local import LocalCheckpoints, forget
from mstrain.checkpoints.schedule import Schedule
from mstrain.data.token_file import DamagedTokens
from mstrain.job.exit_codes import FINISHED, STOPPED
from mstrain.job.preemption import Preemption
from mstrain.program.memory import peak_bytes
from mstrain.program.optimizer import rate_of, schedule_of
from mstrain.program.step import State
from mstrain.training import loop
from mstrain.training.announce import announce
from mstrain.training.best_effort import BestEffort
from mstrain.training.evaluate import Evaluator
from mstrain.training.guard import FILE as BAD_STEPS
from mstrain.training.guard import Guard, RollBack
from mstrain.training.json_lines import Log
from mstrain.training.prediction import Measured, compare
from mstrain.training.profiler import profile_hooks
from mstrain.training.record import begin_attempt, config_yaml, missing_metrics, resolved_config
from mstrain.training.remat import with_remat
from mstrain.training.replicas import ReplicaCheck
from mstrain.training.reporter import METRICS, Reporter
from mstrain.training.resume import begin, finished_step
from mstrain.training.rollback import read_order, roll_back, saved_facts, tokens_before
from mstrain.training.run import Run
from mstrain.training.saver import Saver
from mstrain.training.stopped import Stopped
from mstrain.training.summary import is_summarized, summarize
from mstrain.training.watchdog import Watchdog
from mstrain.training.weights_and_biases import WandbRun


def train(run: Run, check_lock: Callable[[], None] = lambda: None) -> int:
    """Trains `run` in its run directory to its last step, or until a signal; returns the exit code.

    `check_lock` is called before every save; it raises Stopped when another trainer has taken the directory over. A
    finished run returns before anything is compiled, unless it was ended before it was summarized.
    """
    last = finished_step(run)
    if last is not None and (last > run.config.steps or is_summarized(run)):
        run.console.print(
            f"{run.config.run_dir} has all {last} steps. Type steps=N allow=steps with N above {last}, "
            f"another run_dir=, or mstrain sample run_dir={run.config.run_dir} prompt=TEXT."
        )
        return FINISHED
    if last is None:
        run = with_remat(run)
        announce(run)
        run.memory.check()
    directory = Path(run.config.run_dir)
    _make_folder(run, directory)
    keep = run.config.checkpoint
    checkpoints = Checkpoints(directory / "checkpoints", keep.keep, run.job, keep.keep_every)
    local = _local_checkpoints(run, directory)
    try:
        with BestEffort(run.job.log) as observers:
            code = None if last is None else _summarize_finished(run, checkpoints, local, observers)
            while code is None:
                code = _attempt(run, checkpoints, local, observers, check_lock)
            return code
    except DamagedTokens:
        run.corpus.verification.wait()  # removes the token files, so that a restart makes them again
        raise
    except Stopped as stopped:
        run.console.print(f"[red]{escape(stopped.reason)}[/]")
        raise
    finally:
        checkpoints.close()


def _local_checkpoints(run: Run, directory: Path) -> LocalCheckpoints | None:
    local_dir = run.config.checkpoint.local_dir
    if not local_dir:
        if run.job.leads:
            forget(directory)
        return None
    return LocalCheckpoints(Path(local_dir), directory, run.module, run.optimizer, run.job, run.job.log)


def _attempt(
    run: Run,
    checkpoints: Checkpoints,
    local: LocalCheckpoints | None,
    observers: BestEffort,
    check_lock: Callable[[], None],
) -> int | None:
    """Trains from the newest checkpoint; returns the exit code, None after a rollback."""
    resumes = bool(checkpoints.steps or local)
    with run.goodput.spend("restore" if resumes else "initialize"):
        if resumes:  # a resumed run reads verified tokens only
            run.corpus.verification.wait()
        state, done = begin(run, checkpoints, local)
    assert done < run.config.steps, "finished_step has returned"
    saved = saved_facts(done, checkpoints, local)
    guard, before = _guard(run, saved, done, observers), tokens_before(saved, done)

    def tokens_seen(step: int) -> int:
        return before + (step - done) * run.config.tokens

    saver = Saver(run, checkpoints, check_lock, guard, tokens_seen, local)
    if done == 0 and checkpoints.latest is None:  # before any file shows progress; see `mstrain.training.previous`
        with run.goodput.spend("save"):
            saver.ensure(0, state)
    try:
        return _train_from(run, state, done, guard, saver, observers, tokens_seen)
    except RollBack as rolled_back:
        spike = rolled_back.spike
    roll_back(run, checkpoints, local, guard.order, spike)
    return None


def _train_from(
    run: Run, state: State, done: int, guard: Guard, saver: Saver, observers: BestEffort,
    tokens_seen: Callable[[int], int],
) -> int:  # fmt: skip
    config, job, goodput, directory = run.config, run.job, run.goodput, Path(run.config.run_dir)
    steps = range(done + 1, config.steps + 1)
    if job.leads:
        _open_files(run, observers, done)
    watchdog, preemption = Watchdog(config.watchdog, directory, job, observers), Preemption(job)
    per_step = (watchdog, goodput.step, guard)
    reporter = Reporter(observers, directory, steps, config.log_every, _fields(run, tokens_seen), run.console, per_step)
    _describe(run, reporter, steps)
    evaluator = _evaluator(run, reporter)
    ending = contextlib.ExitStack()
    hooks = _hooks(run, steps, evaluator, saver, observers, ending)
    step_fn, feed = goodput.fed(run.step, lambda index: run.feed(guard.order(index)))
    with ending, reporter, watchdog.watching(), preemption.listening():
        state = loop.train(step_fn, feed, state, preemption.until_stopped(steps), hooks, reporter)
        finished = int(jax.device_get(state["step"]))
        with goodput.spend("save"):
            if finished > done:
                saver.finish(finished, state)
        goodput.write(finished=finished == config.steps)
        reporter.scalars(finished, {f"goodput/{kind}": x for kind, x in goodput.account()["seconds"].items()})
    _compare_prediction(run, reporter, finished - done)
    if finished < config.steps:
        run.console.print(
            f"[bold]Stopped[/] after step {finished} of {config.steps}, which is saved. The same command resumes there."
        )
        return STOPPED
    step_seconds = reporter.seconds / reporter.steps if reporter.steps else None
    summarize(run, state, evaluator, step_seconds, observers, guard.bad_steps)
    return FINISHED


def _summarize_finished(
    run: Run, checkpoints: Checkpoints, local: LocalCheckpoints | None, observers: BestEffort
) -> int:
    """Summarizes a run whose process ended between its last save and its summary; returns the exit code."""
    with run.goodput.spend("restore"):
        state, done = begin(run, checkpoints, local)
    guard = _guard(run, saved_facts(done, checkpoints, local), done, observers)
    if run.job.leads:
        run.goodput.open(observers, Path(run.config.run_dir), done)
    evaluator = Evaluator(run.config.eval, run.module, run.corpus.validation, run.validation_feed)
    with run.goodput.spend("evaluate"):
        evaluator.measure(state["params"])
    if local:
        local.finish(done=True)
    run.goodput.write(finished=True)
    summarize(run, state, evaluator, None, observers, guard.bad_steps)
    return FINISHED


def _describe(run: Run, reporter: Reporter, steps: range) -> None:
    """Configuration and compiled memory for TensorBoard; both and all scalars for Weights & Biases with wandb=."""
    if run.config.wandb and run.job.leads:
        values = dataclasses.asdict(resolved_config(run))
        reporter.add(WandbRun(BestEffort(run.job.log), run.config.wandb, Path(run.config.run_dir), values))
    reporter.text("configuration", config_yaml(run))
    reporter.scalars(steps[0] - 1, {"memory/compiled_bytes": run.memory.peak})


def _compare_prediction(run: Run, reporter: Reporter, made: int) -> None:
    """Prints predicted beside measured step time after `made` steps."""
    if run.prediction and reporter.steps:
        waited = run.goodput.seconds["input"] / made
        busy = reporter.busy_seconds / (os.cpu_count() or 1)
        measured = Measured(reporter.seconds / reporter.steps, waited, busy / reporter.steps)
        for line in compare(run.prediction, measured, jax.devices()[0].platform == "cpu"):
            run.console.print(f"[bold]{'Step':7}[/]{line}")


def _guard(run: Run, saved: dict, done: int, observers: BestEffort) -> Guard:
    """The guard with the history that the checkpoint of step `done` has `saved`."""
    log = Log(observers, Path(run.config.run_dir) / BAD_STEPS, done) if run.job.leads else None
    order = read_order(run, saved)
    return Guard(run.config.guard, run.config.steps, order, log, run.console, saved.get("guard"))


def _evaluator(run: Run, reporter: Reporter) -> Evaluator:
    return Evaluator(run.config.eval, run.module, run.corpus.validation, run.validation_feed, reporter)


def _open_files(run: Run, observers: BestEffort, done: int) -> None:
    """Records in the files of run_dir that an attempt starts after step `done`; prints which metrics are missing."""
    directory = Path(run.config.run_dir)
    begin_attempt(run, done, observers)
    if gaps := observers.attempt(METRICS, missing_metrics, directory, done, default=""):
        run.console.print(f"[yellow]Resume:[/] {METRICS} lacks lines up to step {done}: steps {gaps}.")
    run.goodput.open(observers, directory, done)


def _hooks(
    run: Run, steps: range, evaluator: Evaluator, saver: Saver, observers: BestEffort, ending: contextlib.ExitStack
) -> list[loop.Hook]:
    """Hooks in order: replicas are compared before a save, and a trace contains steps only. `ending` ends a trace."""
    config, goodput = run.config, run.goodput
    if config.profile.start is not None and config.profile.start not in steps:
        run.console.print(
            f"[yellow]Profile:[/] profile.start={config.profile.start} is a step of an earlier attempt, so this one "
            f"records no trace. Type a start from {steps[0]} on for another one."
        )
    begin_profile, end_profile = profile_hooks(config.profile, Path(config.run_dir), steps, observers, ending)

    def save_and_account(save, step: int, state: State) -> None:
        observers.wait()  # a checkpoint comes after the lines of its steps
        with goodput.spend("save"):
            save(step, state)
        goodput.write()

    schedule = Schedule(config.checkpoint, steps, run.job)
    return [
        *end_profile,
        loop.every(config.check_replicas.every, config.steps, ReplicaCheck(run.job)),
        loop.every(config.eval.every, config.steps, goodput.timed("evaluate", evaluator)),
        loop.Hook(schedule, functools.partial(save_and_account, saver)),
        loop.Hook(schedule.is_local, functools.partial(save_and_account, saver.save_locally)),
        *begin_profile,
    ]


def _make_folder(run: Run, directory: Path) -> None:
    """Process 0 makes the run directory; raises ValueError when it cannot be written."""
    if run.job.leads:
        try:
            (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ValueError(
                f"Cannot write into run_dir={directory} ({error.strerror}). Type another run_dir=."
            ) from None
    run.job.barrier("run folder")


def _fields(run: Run, tokens_seen: Callable[[int], int]):
    """Fields of a logged step that follow from its number and duration."""
    steps = run.config.steps
    # By NumPy: read from the device, a rate would wait for the next step.
    rates = rate_of(run.config.optimizer.schedule, schedule_of(run.config.optimizer, steps), np.arange(steps))
    tokens = run.config.tokens
    predicted, device = run.prediction.seconds if run.prediction else None, jax.local_devices()[0]

    def fields(step: int, seconds: float) -> dict:
        return {
            "learning_rate": float(rates[step - 1]),
            "tokens_per_second": tokens / seconds,
            "tokens_seen": tokens_seen(step),
            "mfu": run.mfu(seconds),
            "memory_bytes": peak_bytes(device),
            "predicted_step_seconds": predicted,
        }

    return fields
