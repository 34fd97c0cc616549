"""Real processes, killed while training and while saving, then started again by the same command."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.quick import QUICK_FLAGS
from tests.training.runs import ARGUMENTS, lines, losses, saved_steps

ROOT = Path(__file__).parent.parent.parent
STEPS = 12
RUN = [f"steps={STEPS}", "checkpoint.every=3", "checkpoint.keep=2", "eval.every=100", "parallel.slices=2"]
HOME, ELSEWHERE = "mesh=2x4", "mesh=4x2"
PATIENCE = 240  # seconds


# train.py that says in the end how many programs it compiled and how many it took from the cache.
COUNTING = """
import collections, jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
from mstrain.cli import run_command
from mstrain.commands.train import COMMAND
try:
    run_command(COMMAND)
finally:
    print("compiled", events["cache_misses"], "taken", events["cache_hits"])
"""


class Command:
    """train.py in a process of its own; compiled programs are shared with those before it."""

    def __init__(self, directory: Path, cache: Path, mesh: str):
        self.directory = directory
        places = [f"run_dir={directory}", f"data.cache_dir={cache / 'corpora'}"]
        arguments = [*ARGUMENTS, *RUN, mesh, *places, f"compile_cache={cache / 'programs'}"]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK_FLAGS,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", COUNTING, *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def finish(self) -> str:
        """What it printed; fails unless it ended well."""
        shown, _ = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0, shown
        return shown

    def kill_when(self, sees) -> None:
        """SIGKILL as soon as `sees()`; fails when the process ends before."""
        end = time.monotonic() + PATIENCE
        while not sees():
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < end, "nothing to kill for"
            time.sleep(0.001)
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()
        assert self._process.returncode == -signal.SIGKILL

    def has_logged(self, steps: int) -> bool:
        path = self.directory / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") >= steps

    def is_saving(self, step: int) -> bool:
        """A checkpoint of `step` is under way: begun, and not yet under its name."""
        folder = self.directory / "checkpoints"
        return any(name.startswith(f"{step}.") for name in (os.listdir(folder) if folder.exists() else ()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def uninterrupted(cache):
    Command(cache / "uninterrupted", cache, HOME).finish()
    return cache / "uninterrupted"


def test_killed_twice_the_run_is_the_same_and_elsewhere_nearly(uninterrupted, cache, tmp_path):
    directory = tmp_path / "run"
    first = Command(directory, cache, HOME)
    first.kill_when(lambda: first.has_logged(5))
    while_saving = Command(directory, cache, HOME)
    while_saving.kill_when(lambda: while_saving.is_saving(9))
    resumed = saved_steps(directory)[-1]
    assert resumed in (6, 9)  # 9 when the save was quicker than the kill
    shutil.copytree(directory, tmp_path / "elsewhere")

    shown = Command(directory, cache, HOME).finish()
    assert f"Resume after step {resumed} of" in shown
    compiled, taken = map(int, re.search(r"compiled (\d+) taken (\d+)", shown).groups())
    assert compiled == 0 and taken > 0  # the lives before have compiled all that a restart needs
    assert losses(directory) == losses(uninterrupted)
    for name in ("grad_norm", "learning_rate"):
        assert [row[name] for row in lines(directory)] == [row[name] for row in lines(uninterrupted)]
    assert saved_steps(directory) == [9, 12]
    assert not [path for path in (directory / "checkpoints").iterdir() if not path.name.isdigit()]

    Command(tmp_path / "elsewhere", cache, ELSEWHERE).finish()
    np.testing.assert_allclose(losses(tmp_path / "elsewhere"), losses(uninterrupted), rtol=1e-5)
    attempts = [(attempt["mesh"], attempt["after_step"]) for attempt in lines(tmp_path / "elsewhere", "history.jsonl")]
    assert attempts[-1] == ("row4-col2", resumed) and attempts[0] == ("row2-col4", 0)
