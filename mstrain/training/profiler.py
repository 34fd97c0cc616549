"""Records a profiler trace of a few steps in `run_dir`, in the format of TensorBoard's profile plugin."""

import contextlib
import dataclasses
from pathlib import Path

import jax

from mstrain.checks import at_least
from mstrain.training import files
from mstrain.training.best_effort import BestEffort
from mstrain.training.loop import Hook
from mstrain.training.tensorboard import NAME as TENSORBOARD

SECONDS = 300.0  # time limit for writing a trace


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A profiler trace of some steps."""

    start: int | None = None
    """First step of a trace for TensorBoard's profile tab. Null records no trace."""
    steps: int | None = None
    """Number of steps in the trace. Requires profile.start=."""

    def __post_init__(self):
        if (self.start is None) != (self.steps is None):
            raise ValueError("profile.start and profile.steps belong together. Type profile.start=10 profile.steps=3.")
        if self.start is not None:
            at_least("profile", self, start=1, steps=1)


def profile_hooks(
    config: ProfileConfig, directory: Path, steps: range, observers: BestEffort, ending: contextlib.ExitStack
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that begin the trace and hooks that end it; empty without a trace or when its steps are already done.

    Run the first after all other hooks and the second before them, so that the trace contains steps only. `ending` is
    closed after the attempt, which ends a trace that a signal or a rollback has cut short.
    """
    if config.start is None or config.steps is None or config.start not in steps:
        return [], []
    before, last = config.start - 1, min(config.start + config.steps - 1, steps[-1])
    logs = directory / TENSORBOARD

    def stop():
        observers.attempt("profile", jax.profiler.stop_trace, seconds=SECONDS)

    def start(*_):
        observers.attempt("profile", _start, logs)
        ending.callback(stop)

    def end(step, state):
        jax.block_until_ready(state)
        ending.close()

    ends = [Hook(lambda step: step == last, end)]
    if before < steps[0]:
        start()
        return [], ends
    return [Hook(lambda step: step == before, start)], ends


def _start(logs: Path) -> None:
    files.make_folder(logs)
    options = jax.profiler.ProfileOptions()
    # Tracing Python calls of all threads causes a segmentation fault when the trace stops in about one of fifty runs
    # (jax 0.10.2, with the threads of TensorBoard's writer and the watchdog).
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(logs), profiler_options=options)
