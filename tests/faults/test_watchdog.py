"""A step that hangs, and the account of the time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mstrain.job.exit_codes import RESTART
from mstrain.job.job import ALONE
from mstrain.training import watchdog
from mstrain.training.goodput import Goodput, account
from mstrain.training.watchdog import Watchdog, WatchdogConfig

ROOT = Path(__file__).resolve().parents[2]
HANG = """
import sys, time, pathlib
from mstrain.job.job import ALONE
from mstrain.training import watchdog
watchdog.LOOK_SECONDS = 0.05
limits = watchdog.WatchdogConfig(least_seconds=0.2, limit_seconds=1)
dog = watchdog.Watchdog(limits, pathlib.Path(sys.argv[1]), ALONE)
def the_function_that_hangs():
    time.sleep(60)
with dog.watching():
    for step in (1, 2, 3):
        dog(step, {"step_seconds": 0.01})
    the_function_that_hangs()
"""


def test_a_step_that_hangs_leaves_its_stacks_and_ends(tmp_path):
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANG, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == RESTART and time.monotonic() - begun < 40
    stacks = (tmp_path / "stacks" / "process-0.txt").read_text()
    assert "the_function_that_hangs" in stacks and "step 4 has taken" in stacks
    assert (
        "the stacks of all threads are in" in done.stdout
        and "did not end within watchdog.limit_seconds=1" in done.stdout
    )


def test_slow_steps_are_told_once_each_and_quick_ones_never(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.02)
    dog = Watchdog(WatchdogConfig(factor=10, least_seconds=0.2), tmp_path, ALONE)
    with dog.watching():
        for step in range(1, 6):
            time.sleep(0.6 if step == 5 else 0.01)
            dog(step, {"step_seconds": 0.01})
    assert capsys.readouterr().out.count("has taken") == 1


def test_an_undisturbed_run_leaves_no_file(tmp_path):
    with Watchdog(WatchdogConfig(), tmp_path, ALONE).watching():
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.5}, {"least_seconds": -1.0}, {"limit_seconds": 0.0}, {"factor": float("nan")}]
)
def test_limits_must_be_limits(wrong):
    with pytest.raises(ValueError, match="Type watchdog."):
        WatchdogConfig(**wrong)


def test_goodput_adds_up_over_lives(tmp_path):
    first = Goodput()
    first.seconds |= {"steps": 30.0, "compile": 10.0}
    first._started -= 50
    first.write(tmp_path)
    first.seconds |= {"steps": 40.0}  # the next line of the same life replaces the first
    first._started -= 10
    first.write(tmp_path)
    with open(tmp_path / "goodput.jsonl", "a") as file:
        file.write('{"life": 3, "steps')  # killed while writing
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 7, "step_seconds": 3.0}\n{"step": 8, "step_seconds": 5.0}\n{"step": 9, "st')
    os.utime(metrics, (first._begun + 100, first._begun + 100))
    (tmp_path / "goodput.jsonl").write_text((tmp_path / "goodput.jsonl").read_text() + "\n")
    second = Goodput()
    second._begun = first._begun + 107
    second.lose(tmp_path, 7)
    second.seconds |= {"steps": 20.0}
    second._started -= 28
    second.write(tmp_path, finished=True)
    found = account(tmp_path)
    assert found["lives"] == 2 and found["seconds"]["lost"] == pytest.approx(12)
    assert found["goodput"] == pytest.approx(60 / (60 + 28 + 12), rel=1e-3)
    assert found["seconds"]["other"] == pytest.approx(60 - 50 + 28 - 20, abs=0.1)
    third = Goodput()
    third._begun = second._begun + 10_000
    third.lose(tmp_path, 9)  # the run had finished; it waited for nobody
    assert (
        third.seconds["lost"] == 0
        and json.loads((tmp_path / "goodput.jsonl").read_text().splitlines()[-1])["finished"]
    )
