"""Observers never stop training: whatever happens to logs, pictures, traces and output, the steps are made."""

import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mstrain.job.job import ALONE
from mstrain.training import best_effort, files, json_lines
from mstrain.training.best_effort import BestEffort
from mstrain.training.curves import plot_loss
from mstrain.training.goodput import Goodput
from mstrain.training.guard import FILE as BAD_STEPS
from mstrain.training.reporter import Reporter
from mstrain.training.session import train
from mstrain.training.stopped import Stopped
from mstrain.training.watchdog import Watchdog, WatchdogConfig
from tests.faults.test_storage import again
from tests.job.processes import ROOT, arguments
from tests.quick import QUICK_FLAGS
from tests.training.runs import lines, make, saved_steps
from tests.training.test_files import scalars

STEPS = range(1, 5)


def test_a_failure_is_warned_of_once_and_every_one_is_counted():
    warnings, done = [], []
    with BestEffort(warnings.append) as observers:
        for number in range(3):
            observers.do("picture", lambda: 1 / 0)
            observers.do("log", done.append, number)
        assert observers.attempt("log", lambda: 5) == 5 and observers.attempt("picture", lambda: 1 / 0) is None
    assert done == [0, 1, 2] and observers.failures == {"picture": 4}
    assert len(warnings) == 1 and "picture: ZeroDivisionError" in warnings[0]


def test_an_action_that_blocks_delays_nobody(monkeypatch):
    monkeypatch.setattr(best_effort, "WAITING", 20)
    warnings, done, answer = [], [], threading.Event()
    observers = BestEffort(warnings.append)
    observers.do("log", answer.wait)
    while observers._actions:
        pass
    for number in range(30):
        observers.do("log", done.append, number)
    assert observers.attempt("trace", lambda: 1, default="none", seconds=0.01) == "none"
    assert not observers.wait(0.01) and not observers.wait(1e6)  # it waits in vain once
    assert observers.failures == {"log": 10, "trace": 1} and len(warnings) == 2
    answer.set()
    with observers:
        pass
    assert done == [*range(20)]


class Faults:
    """Fails the `nth` operation that the threads of observers ask of the file system, and no other."""

    OPERATIONS = ("open", "write", "mkdir", "replace", "ftruncate", "pread")

    def __init__(self, monkeypatch):
        self.count, self.nth = 0, None
        for name in self.OPERATIONS:
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, operation):
        def call(*args, **keywords):
            if threading.current_thread().name == "best effort":
                self.count += 1
                if self.count == self.nth:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return operation(*args, **keywords)

        return call


def observe(directory: Path, before_step=lambda step: None) -> tuple[BestEffort, list[str]]:
    """Everything that a run of four steps writes about itself, resumed after step 1 of three."""
    directory.mkdir()
    for name in ("metrics.jsonl", "eval.jsonl", "goodput.jsonl"):
        (directory / name).write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "loss": 3.9}\n{"step": 3, "lo')
    warnings, goodput = [], Goodput()
    with BestEffort(warnings.append) as observers:
        goodput.open(observers, directory, 1)
        notes = json_lines.Log(observers, directory / BAD_STEPS, 1)
        fields = {"learning_rate": 0.1, "tokens_per_second": 1.0, "mfu": None}
        quiet = Console(file=io.StringIO())
        watchdog = Watchdog(WatchdogConfig(), directory, ALONE, observers)
        watched = (watchdog, goodput.step)
        with Reporter(observers, directory, STEPS[1:], 1, lambda *_: fields, quiet, watched) as reporter:
            for step in STEPS[1:]:
                observers.wait()
                before_step(step)
                reporter.step(step, {"loss": np.float32(4 / step), "grad_norm": 1.0, "skipped": 0.0})
                reporter.evaluation(step, {"validation_loss": 3.0})
                notes.append({"step": step})
                goodput.write()
            watchdog._dump(5.0)
        notes.retry()
        observers.do("summary.json", files.replace, directory / "summary.json", b"{}\n")
        observers.do("loss.png", plot_loss, directory, 4.0)
    return observers, warnings


def test_every_operation_fails_once_and_nothing_is_lost_or_doubled(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, dpi: file.write(b"a picture"))  # drawing takes long
    faults = Faults(monkeypatch)
    observers, warnings = observe(tmp_path / "undisturbed")
    assert not observers.failures and not warnings
    points, wanted = faults.count, sorted(path.name for path in (tmp_path / "undisturbed").iterdir())
    assert points > 60
    for nth in range(1, points + 1):
        faults.count, faults.nth = 0, nth
        directory = tmp_path / str(nth)
        observers, warnings = observe(directory)
        assert len(warnings) == len(observers.failures) == 1 and observers.failures.total() == 1, nth
        for name, first in (("metrics.jsonl", 1), ("eval.jsonl", 1), (BAD_STEPS, 2)):
            assert [row["step"] for row in lines(directory, name)] == [*range(first, 5)], (nth, name)
        found = scalars(directory)
        assert {step for tag, step in found if tag == "train/loss"} == {2, 3, 4}, nth
        absent = set(wanted) - {path.name for path in directory.iterdir()}
        assert absent <= {"summary.json", "loss.png", "stacks"} and len(absent) <= 1, (nth, absent)
        assert not [*directory.rglob("*.tmp")]


SMALL_DISK = """
import errno, pathlib, resource, shutil, sys
from tests.faults.test_observers import observe
directory, limited = pathlib.Path(sys.argv[1]), sys.argv[2] == "limit"
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
def fill():
    if limited:
        return resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    with open(directory / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(512)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
def free():
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (directory / "filler").unlink(missing_ok=True)
changes = {2: fill, 4: free}
observers, warnings = observe(directory / "run", lambda step: changes.get(step, lambda: None)())
assert len(warnings) == len(observers.failures), (warnings, observers.failures)
shutil.copytree(directory / "run", sys.argv[3])  # the disk goes with the process
print(*sorted(observers.failures))
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def mounts() -> bool:
    """Whether this machine lets anybody mount a small file system."""
    probe = (*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt")
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


def test_a_disk_that_is_full_for_two_steps_loses_no_line(tmp_path):
    """A file system of 256 KiB; where none can be mounted, the kernel's limit of a file's size."""
    place, kept, small = tmp_path / "disk", tmp_path / "kept", mounts()
    place.mkdir()
    command = [sys.executable, "-c", SMALL_DISK, str(place), "small" if small else "limit", str(kept)]
    if small:
        mount = f'mount -t tmpfs -o size=256k none {place} && exec "$@"'
        command = [*NAMESPACE, "sh", "-c", mount, "sh", *command]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bad_steps.jsonl" in done.stdout.splitlines()[-1]
    for name, first in (("metrics.jsonl", 1), ("eval.jsonl", 1), (BAD_STEPS, 2)):
        assert [row["step"] for row in lines(kept, name)] == [*range(first, 5)]
    assert {step for tag, step in scalars(kept) if tag == "train/loss"} == {2, 3, 4}
    assert (kept / "loss.png").stat().st_size > 1000 and "step 5 has taken" in done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run whose compiled step serves the tests below."""
    small = ("model.layers=1", "model.width=32", "model.mlp_dim=64", "parallel=collective", "mesh=1x2")
    return make(tmp_path_factory.mktemp("observers") / "made", *small, "steps=5", "checkpoint.every=4", "eval.every=3")


def test_a_full_disk_during_steps_costs_no_step(made, tmp_path, monkeypatch, capsys):
    """The kernel refuses every byte that the process writes into a file between steps 2 and 3."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = Reporter.step

    def step(reporter, number, metrics):
        reporter._files.wait()
        if number == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        original(reporter, number, metrics)
        reporter._files.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(Reporter, "step", step)
    run = again(made, tmp_path / "run")
    assert train(run) == 0
    directory = tmp_path / "run"
    assert [row["step"] for row in lines(directory)] == [1, 2, 3, 4, 5]
    assert {step for tag, step in scalars(directory) if tag == "train/loss"} == {1, 2, 3, 4, 5}
    assert [row.get("observer_failures") for row in lines(directory)] == [None, None, 2, 2, 2]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["observer_failures"] == {"metrics.jsonl": 1, "tensorboard": 1}
    assert saved_steps(directory) == [4, 5]
    assert capsys.readouterr().out.count(os.strerror(errno.EFBIG)) == 2


def test_a_run_directory_that_vanishes_ends_the_run_with_the_reason(made, tmp_path, monkeypatch, capsys):
    original, directory = Reporter.step, tmp_path / "run"

    def step(reporter, number, metrics):
        if number == 2:
            reporter._files.wait()
            shutil.rmtree(directory)
        original(reporter, number, metrics)

    monkeypatch.setattr(Reporter, "step", step)
    run = again(made, directory)
    with pytest.raises(Stopped) as stopped:
        train(run)
    assert stopped.value.code == 1 and "saves in a row failed, the last that of step 5" in stopped.value.reason
    shown = capsys.readouterr().out
    assert "metrics.jsonl: No such file" in shown and "saving step 4 failed" in shown and not directory.exists()


# What a shell, a terminal or another program may leave in a run directory. `other` is outside of it.
WRONG_KINDS = {
    "metrics.jsonl": lambda path, other: path.mkdir(),
    "goodput.jsonl": lambda path, other: os.mkfifo(path),
    "eval.jsonl": lambda path, other: path.symlink_to(other / "log"),
    "bad_steps.jsonl": lambda path, other: path.write_bytes(bytes(range(256)) * 9),
    "config.yaml": lambda path, other: path.mkdir(),
    "summary.json": lambda path, other: path.symlink_to(other / "log"),
    "loss.png": lambda path, other: path.symlink_to("/dev/full"),
    "tensorboard": lambda path, other: path.symlink_to(other, target_is_directory=True),
    "stacks": lambda path, other: path.write_text("a file"),
}


def test_wrong_kinds_of_files_and_broken_outputs_cost_no_step(tmp_path):
    """Nobody reads standard output, and the terminal behind standard error is gone after a line."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    (other / "log").write_text("not the run's\n")
    for name, make_kind in WRONG_KINDS.items():
        make_kind(run / name, other)
    reader, output = os.pipe()
    os.close(reader)
    terminal, errors = os.openpty()
    more = ("mesh=1x1", "steps=3", "checkpoint.every=2", "profile.start=2", "profile.steps=1")
    words = arguments(run, tmp_path / "cache", *more)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    process = subprocess.Popen(
        [sys.executable, "train.py", *words], cwd=ROOT, env=environment, stdout=output, stderr=errors,
        start_new_session=True,
    )  # fmt: skip
    os.close(errors)
    first = os.read(terminal, 1000)
    os.close(terminal)
    try:
        assert process.wait(240) == 0
    finally:
        process.kill()
        os.close(output)
    assert b"train: stdout: Broken pipe. Training continues" in first
    assert saved_steps(run) == [2, 3] and (other / "log").read_text() == "not the run's\n"
    assert [path.name for path in other.iterdir()] == ["log"]
    assert (run / "bad_steps.jsonl.foreign").read_bytes() == bytes(range(256)) * 9
