"""The training loop: load, step, log; hooks evaluate, save and profile at their intervals.

Step k is the k-th optimizer update. It uses batch k - 1 and ends with `state["step"] == k`.
"""

import dataclasses
from collections.abc import Callable, Iterable

import jax

from mstrain.program.step import State
from mstrain.training.reporter import Reporter


@dataclasses.dataclass(frozen=True)
class Hook:
    """Calls `act(step, state)` after the steps for which `due(step)` holds."""

    due: Callable[[int], bool]
    act: Callable[[int, State], None]


def every(interval: int | None, last: int, act) -> Hook:
    """A hook after every `interval`-th step and after the last one; never for None."""
    return Hook(lambda step: interval is not None and (step % interval == 0 or step == last), act)


def train(step_fn, feed, state: State, steps: Iterable[int], hooks: list[Hook], reporter: Reporter) -> State:
    """Runs `steps` and returns the last state.

    Metrics of a step are read while the next one runs: reading them at once would leave the devices idle
    between steps.
    """
    unread = None
    for step in steps:
        with jax.profiler.StepTraceAnnotation("train", step_num=step):  # the steps of a trace's overview
            state, metrics = step_fn(state, feed(step - 1))
        if unread:
            reporter.step(*unread)
        unread = (step, metrics)
        due = [hook for hook in hooks if hook.due(step)]
        if due:
            reporter.step(*unread)
            unread = None
            with reporter.pause():
                for hook in due:
                    hook.act(step, state)
    if unread:
        reporter.step(*unread)
    return state
