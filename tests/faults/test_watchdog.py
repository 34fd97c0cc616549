"""A step that hangs, and the account of the time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.job.exit_codes import RESTART, restartable
from mstrain.job.job import ALONE
from mstrain.training import watchdog
from mstrain.training.best_effort import BestEffort
from mstrain.training.goodput import KINDS, Goodput
from mstrain.training.watchdog import Watchdog, WatchdogConfig

ROOT = Path(__file__).resolve().parents[2]
HANG = """
import re, sys, time, pathlib
from mstrain.job.job import ALONE
from mstrain.training import watchdog
from mstrain.training.best_effort import BestEffort
watchdog.CHECK_SECONDS = 0.05
limits = watchdog.WatchdogConfig(least_seconds=0.2, limit_seconds=1)
dog = watchdog.Watchdog(limits, pathlib.Path(sys.argv[1]), ALONE, BestEffort(print))
watchdog.BUSY_SECONDS = 0.5
def the_function_that_hangs():
    if len(sys.argv) == 2:
        time.sleep(60)
    time.sleep(0.3)
    re.match("(a+)+b", "a" * 60)  # for ever, without giving up the interpreter
with dog.watching():
    for step in (1, 2, 3):
        dog(step, {"step_seconds": 0.01})
    the_function_that_hangs()
"""


def test_a_step_that_hangs_leaves_its_stacks_and_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANG, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == RESTART
    stacks = (tmp_path / "stacks" / "process-0.txt").read_text()
    assert "the_function_that_hangs" in stacks and "step 4 has taken" in stacks
    assert (
        "the stacks of all threads are in" in done.stdout
        and "did not end within watchdog.limit_seconds=1" in done.stdout
    )


def test_a_thread_that_never_gives_up_the_interpreter_is_ended_so_that_a_launcher_restarts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANG, tmp_path, "busy"], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == -signal.SIGALRM and restartable(done.returncode)
    assert "the_function_that_hangs" in done.stderr


def test_slow_steps_are_told_once_each_and_quick_ones_never(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.02)
    dog = Watchdog(WatchdogConfig(factor=10, least_seconds=0.2), tmp_path, ALONE, BestEffort(print))
    with dog.watching():
        for step in range(1, 6):
            time.sleep(0.6 if step == 5 else 0.01)
            dog(step, {"step_seconds": 0.01})
    assert capsys.readouterr().out.count("has taken") == 1


def test_an_undisturbed_run_leaves_no_file(tmp_path):
    with Watchdog(WatchdogConfig(), tmp_path, ALONE, BestEffort(print)).watching():
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.5}, {"least_seconds": -1.0}, {"limit_seconds": 0.0}, {"factor": float("nan")}]
)
def test_limits_must_be_limits(wrong):
    with pytest.raises(ValueError, match="Type watchdog."):
        WatchdogConfig(**wrong)


def test_goodput_adds_up_over_restarts(tmp_path):
    path, begun = tmp_path / "goodput.jsonl", time.time() - 1000
    first = {"attempt": begun, "finished": False, "total": 50.0, **dict.fromkeys(KINDS, 0.0), "steps": 30.0}
    rows = [first, {**first, "total": 60.0, "steps": 40.0, "compile": 10.0}]  # the last line of an attempt counts
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"attempt": 3, "steps')  # killed while writing
    second = Goodput()
    second._begun = begun + 107
    with BestEffort(print) as observers:
        second.open(observers, tmp_path, 7)
        second.seconds |= {"steps": 20.0}
        second._started -= 28
        second.write(finished=True)
    found = second.account()
    assert found["attempts"] == 2 and found["seconds"]["lost"] == pytest.approx(47)  # since the last line, at 60
    assert found["goodput"] == pytest.approx(60 / (60 + 28 + 47), rel=1e-2)
    assert found["seconds"]["other"] == pytest.approx(60 - 50 + 28 - 20, abs=1)
    third = Goodput()
    third._begun = second._begun + 10_000
    with BestEffort(print) as observers:
        third.open(observers, tmp_path, 9)
    assert third.seconds["lost"] == 0  # the run had finished; it waited for nobody
    assert third.account()["seconds"]["steps"] == 60


def test_goodput_counts_steps_that_are_rolled_back_once_and_as_lost(tmp_path):
    goodput = Goodput()
    goodput._started -= 40
    with BestEffort(print) as observers:
        goodput.open(observers, tmp_path, 0)
        for step in range(1, 9):
            goodput.step(step, {"step_seconds": 3.0})
            if step == 4:
                goodput.write()
        goodput.open(observers, tmp_path, 4)
        for step in range(5, 7):
            goodput.step(step, {"step_seconds": 3.0})
        goodput.write(finished=True)
    found = goodput.account()
    assert (found["seconds"]["steps"], found["seconds"]["lost"]) == (18, 12)
    assert found["goodput"] == pytest.approx(18 / 40, rel=1e-2)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.dictionaries(
    st.sampled_from(["attempt", "total", "finished", "observer_failures", *KINDS]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.floats(), max_size=2),
), max_size=4))  # fmt: skip
def test_any_account_of_earlier_attempts_is_read(tmp_path_factory, rows):
    directory = tmp_path_factory.getbasetemp() / "goodput"
    directory.mkdir(exist_ok=True)
    (directory / "goodput.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    goodput, warnings = Goodput(), []
    with BestEffort(warnings.append) as observers:
        goodput.open(observers, directory, 0)
    assert not warnings and goodput.account()["seconds"].keys() == {*KINDS, "other"}
