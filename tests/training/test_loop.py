"""The loop reads metrics late, and lets hooks look at the state at their steps."""

import contextlib
import time

import pytest

from mstrain.training.best_effort import BestEffort
from mstrain.training.goodput import Goodput
from mstrain.training.loop import every, train
from mstrain.training.profiler import ProfileConfig, profile_hooks


class Log:
    """A reporter, a step and a feed that write down who was called when."""

    def __init__(self):
        self.events = []

    def step(self, step, metrics):
        assert metrics == f"metrics {step}"
        self.events.append(f"read {step}")

    @contextlib.contextmanager
    def pause(self):
        self.events.append("pause")
        yield
        self.events.append("go")

    def dispatch(self, state, batch):
        assert batch == state  # step k consumes batch k - 1
        self.events.append(f"dispatch {state + 1}")
        return state + 1, f"metrics {state + 1}"


def run(first, last, hooks):
    log = Log()
    state = train(log.dispatch, lambda step: step, first - 1, range(first, last + 1), hooks(log), log)
    assert state == last
    return log.events


def test_metrics_are_read_after_the_next_step_is_dispatched():
    assert run(1, 3, lambda log: []) == [
        "dispatch 1",
        "dispatch 2",
        "read 1",
        "dispatch 3",
        "read 2",
        "read 3",
    ]


def test_hooks_see_the_state_of_their_step_with_its_metrics_read():
    def hooks(log):
        return [every(2, 5, lambda step, state: log.events.append(f"hook {step} sees {state}"))]

    events = run(3, 5, hooks)
    assert events == [
        "dispatch 3", "dispatch 4", "read 3", "read 4", "pause", "hook 4 sees 4", "go",
        "dispatch 5", "read 5", "pause", "hook 5 sees 5", "go",
    ]  # fmt: skip


def traced(config, steps, monkeypatch, tmp_path, stopped_after=99):
    """Steps after which a trace began and ended; a start before the first step is step `first - 1`."""
    calls, now = [], steps[0] - 1
    monkeypatch.setattr("jax.profiler.start_trace", lambda logs, profiler_options: calls.append(("begin", now)))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append(("end", now)))
    with BestEffort(print) as observers, contextlib.ExitStack() as ending:
        begin, end = profile_hooks(config, tmp_path, steps, observers, ending)
        for now in range(steps[0], min(steps[-1], stopped_after) + 1):
            for hook in (*end, *begin):
                if hook.due(now):
                    hook.act(now, {})
    return calls


def test_a_trace_covers_the_steps_asked_for(monkeypatch, tmp_path):
    def of(start, count, steps):
        return traced(ProfileConfig(start, count), steps, monkeypatch, tmp_path)

    assert of(3, 2, range(1, 10)) == [("begin", 2), ("end", 4)]
    assert of(1, 1, range(1, 10)) == [("begin", 0), ("end", 1)]  # from the first step on
    assert of(8, 5, range(1, 10)) == [("begin", 7), ("end", 9)]  # cut at the last step
    assert of(5, 2, range(5, 10)) == [("begin", 4), ("end", 6)]  # resumed right there
    assert of(3, 2, range(5, 10)) == []  # behind us
    assert traced(ProfileConfig(3, 5), range(1, 10), monkeypatch, tmp_path, stopped_after=4)[-1] == ("end", 4)
    assert traced(ProfileConfig(), range(1, 10), monkeypatch, tmp_path) == []


class Loss:
    """The loss of a step that has ended, or still runs."""

    def __init__(self, ended):
        self.is_ready = lambda: ended


def test_only_time_in_which_no_step_runs_counts_as_waiting_for_data():
    goodput, ended = Goodput(), iter([False, True])
    step, feed = goodput.fed(lambda state, batch: (state, {"loss": Loss(next(ended))}), lambda index: time.sleep(0.01))
    waited = []
    for index in range(3):
        batch = feed(index)
        waited.append(goodput.seconds["input"])
        if index < 2:
            step(None, batch)
    assert 0.01 <= waited[0] == waited[1] < waited[2] - 0.01 + 1e-9
    goodput.step(1, {"step_seconds": 1.0})
    goodput.step(2, {"step_seconds": 1.0})
    assert goodput.seconds["steps"] + goodput.seconds["input"] == pytest.approx(2.0)
