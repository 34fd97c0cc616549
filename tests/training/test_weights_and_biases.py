"""wandb=: scalars and configuration through the client of Weights & Biases, without a network."""

import importlib.util
import io
import sys
import time
import types
from pathlib import Path

import pytest
from rich.console import Console

from mstrain.training import session
from mstrain.training.best_effort import BestEffort
from mstrain.training.reporter import Reporter
from mstrain.training.weights_and_biases import FILE, WandbRun
from tests.training.runs import make

VALUES = {"loss": 4.0, "tokens_per_second": 1.0, "step_seconds": 1.0, "mfu": None}


class Client:
    """A double of the client: what it was asked to do."""

    def __init__(self):
        self.asked, self.logged, self.finished = [], [], 0

    def Settings(self, **values):
        return types.SimpleNamespace(**values)

    def init(self, **values):
        self.asked.append(values)
        return types.SimpleNamespace(log=self.logged.append, finish=self._finish, define_metric=lambda *_, **__: None)

    def _finish(self):
        self.finished += 1


@pytest.fixture
def client(monkeypatch):
    double = Client()
    monkeypatch.setitem(sys.modules, "wandb", double)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    return double


def attempt(run):
    with BestEffort(print) as observers:
        directory, console = Path(run.config.run_dir), Console(file=io.StringIO())
        reporter = Reporter(observers, directory, range(1, 3), 1, lambda *_: VALUES, console)
        session._describe(run, reporter, range(1, 3))
        with reporter:
            reporter.step(1, {"loss": 4.0})
            reporter.evaluation(1, {"validation_loss": 3.0})


def test_every_attempt_continues_one_run(client, tmp_path):
    run = make(tmp_path, "mesh=1x1", "wandb=a project")
    vars(run)["memory"] = types.SimpleNamespace(peak=2**20)  # nothing is compiled
    for _ in range(2):
        attempt(run)
    first, second = client.asked
    assert first["id"] == second["id"] == (tmp_path / FILE).read_text() and first["resume"] == "allow"
    assert first["project"] == "a project" and first["config"]["model"]["name"] == "tiny"
    assert client.finished == 2 and len(client.logged) == 6
    assert client.logged[0] == {"memory/compiled_bytes": 2**20, "step": 0}
    logged = {"loss": 4.0, "tokens_per_second": 1.0}
    assert {name: client.logged[1][f"train/{name}"] for name in logged} == logged and client.logged[1]["step"] == 1
    assert "train/mfu" not in client.logged[1]
    assert client.logged[2] == {"eval/validation_loss": 3.0, "step": 1}


def test_a_missing_client_is_named_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Type pip install wandb"):
        make(tmp_path, "mesh=1x1", "wandb=project")


def test_a_client_that_fails_costs_no_step(client, tmp_path):
    client.init = lambda **_: 1 / 0
    warnings = []
    run = WandbRun(BestEffort(warnings.append), "project", tmp_path, {})
    run.scalars(1, {"loss": 4.0})
    run.retry()
    assert len(warnings) == 1 and warnings[0].startswith("wandb: ZeroDivisionError")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb (requirements-dev.txt) is not installed")
def test_the_client_itself_writes_a_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = WandbRun(BestEffort(print), "project", tmp_path, {"model": {"name": "tiny"}})
    run.scalars(1, {"train/loss": 4.5})
    run.retry()
    (written,) = tmp_path.glob(f"wandb/offline-run-*/run-{(tmp_path / FILE).read_text()}.wandb")
    deadline = time.monotonic() + 30  # its service may close the file after finish() has returned
    while written.stat().st_size < 100 and time.monotonic() < deadline:
        time.sleep(0.05)
    content = written.read_bytes()
    assert b"train/loss" in content and b"4.5" in content and b"tiny" in content
