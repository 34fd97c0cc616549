"""Traces a few steps into `run_dir`, in the form TensorBoard's profile plugin opens."""

import dataclasses
from pathlib import Path

import jax

from mstrain.checks import at_least
from mstrain.training import files
from mstrain.training.best_effort import BestEffort
from mstrain.training.loop import Hook
from mstrain.training.tensorboard import NAME as TENSORBOARD

SECONDS = 300.0  # to write a trace


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A trace of some steps."""

    start: int | None = None
    """First step of a trace for TensorBoard's profile tab; null traces nothing."""
    steps: int | None = None
    """Steps in the trace."""

    def __post_init__(self):
        if (self.start is None) != (self.steps is None):
            raise ValueError("profile.start and profile.steps belong together. Type profile.start=10 profile.steps=3.")
        if self.start is not None:
            at_least("profile", self, start=1, steps=1)


def profile_hooks(
    config: ProfileConfig, directory: Path, steps: range, observers: BestEffort
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that begin and that end the trace; none when none is asked for or its steps are behind.

    The first belong behind all other hooks and the second before them, so that the trace holds steps alone.
    """
    if config.start is None or config.start not in steps:
        return [], []
    before, last = config.start - 1, min(config.start + config.steps - 1, steps[-1])
    logs = directory / TENSORBOARD

    def start(*_):
        observers.attempt("profile", _start, logs)

    def end(step, state):
        jax.block_until_ready(state)
        observers.attempt("profile", jax.profiler.stop_trace, seconds=SECONDS)

    ends = [Hook(lambda step: step == last, end)]
    if before < steps[0]:
        start()
        return [], ends
    return [Hook(lambda step: step == before, start)], ends


def _start(logs: Path) -> None:
    files.make_folder(logs)
    options = jax.profiler.ProfileOptions()
    # Following every Python call of every thread makes one run in about fifty end in a segmentation fault when the
    # trace stops (jax 0.10.2, with the threads of TensorBoard's writer and the watchdog), and tells little of a step.
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(logs), profiler_options=options)
