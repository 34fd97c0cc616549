"""Real processes on this machine, gloo between them: one story of a run that is stopped and moved, and jobs
that lose a process.

A start costs seconds, so each story shows several properties: two processes, and a change to one, give the curve
of one process; signals stop all processes after the same step; each process reads its own rows.
"""

import collections
import json
import re
import signal
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from mstrain.checkpoints import manifest
from mstrain.job.exit_codes import RESTART, SIGNALED, STOPPED
from mstrain.job.secret import secret_file
from tests.descriptors import descriptors
from tests.job.fuzz_rendezvous import attack
from tests.job.processes import ROOT, Job, arguments

STEPS = 40
USUAL = [f"steps={STEPS}", "mesh=2x2x2", "checkpoint.every=100", "eval.every=100"]
TOLERANCE = 1e-5  # gloo adds in another order than one process does


def rows(run):
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def saved(run):
    return sorted(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """The losses of one process that was left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(folder, arguments(folder / "run", cache, *USUAL))
    assert job.wait() == [0], job.output
    return [row["loss"] for row in rows(folder / "run")]


def stop_after(job, run, step, number, index=0):
    """Sends the signal when `step` is logged; the exit codes."""
    assert job.wait_for(lambda: len(rows(run)) >= step), job.output[-4000:]
    job.send(number, index)
    return job.wait()


def test_a_run_moves_from_two_processes_to_one(tmp_path, cache, undisturbed, monkeypatch):
    run = tmp_path / "run"
    words = arguments(run, cache, *USUAL)
    monkeypatch.setenv("ROWS", str(tmp_path / "rows"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = Job(tmp_path, words, 2, 0, command=[sys.executable, "-m", "tests.job.spy"])
    assert stop_after(job, run, 4, signal.SIGTERM, index=1) == [STOPPED] * 2, job.output[-4000:]
    first = check_stop(job, run, 2)
    check_reading(tmp_path)

    job = Job(tmp_path, words, 1, 1)
    assert job.wait() == [0], job.output
    assert f"Resume after step {first} of" in job.output
    assert [row["step"] for row in rows(run)] == [*range(1, STEPS + 1)]
    np.testing.assert_allclose([row["loss"] for row in rows(run)], undisturbed, rtol=TOLERANCE)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["attempts"] == 2 and 0 < summary["goodput"] < 1


def check_stop(job, run, processes):
    """The step after which all stopped: saved whole, logged, said once, joining said by each."""
    (step,) = re.findall(r"Stopped after step (\d+) of", job.output)
    assert saved(run)[-1] == int(step) == rows(run)[-1]["step"] and "resumes there" in job.output
    assert not manifest.problems(run / "checkpoints" / step)
    for i, path in enumerate(job.outputs):
        text = path.read_text()
        assert f"process {i} of {processes}: on " in text
        assert f"process {i} of {processes}: joined, {8 // processes} of 8 cpu devices here" in text
    return int(step)


def check_reading(folder):
    """On mesh 2x2x2 with two processes, each needs half of every training batch, and no two the same."""
    read = collections.defaultdict(lambda: collections.defaultdict(set))
    for path in folder.glob("rows.process=*"):
        for line in path.read_text().splitlines():
            name, step, numbers = line.split()
            if name.startswith("train"):
                read[step][path.name] |= set(map(int, numbers.split(",")))
    assert len(read) >= 4
    for step, of_processes in read.items():
        parts = list(of_processes.values())
        assert sorted(row for part in parts for row in part) == [*range(16)], (step, parts)
        assert [len(part) for part in parts] == [8] * 2


BUSY = """
import sys, time
from mstrain.cli import Command, run_command
from mstrain.job.job import HostsConfig, joined
from mstrain.job.process_info import find_process
def main(arguments):
    run_dir, coordinator, processes, process = [word.partition("=")[2] for word in arguments]
    with joined(find_process(coordinator, int(processes), int(process))[0], HostsConfig(), run_dir) as job:
        job.barrier("here")
        print("ready", flush=True)
        while True:
            time.sleep(0.01) if job.leads else 3**6_000_000
run_command(Command("train", main))
"""


def listening(job):
    """Ports, of all addresses, on which one of the processes listens; gloo's are for CPU alone."""
    found = set()
    for process in job.processes:
        own = set(descriptors(process.pid))
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    found.add(words[1])
    return found


def test_the_death_of_process_0_is_named_however_busy_the_others_are(tmp_path):
    """Their Python does nothing else for a second at a time: JAX would end them first, if it noticed.

    They join among attacks; the secret is gone and nothing listens any more when all have joined.
    """
    run = tmp_path / "new" / "run"
    command = [sys.executable, "-c", BUSY]
    job = Job(tmp_path, [f"run_dir={run}"], 3, present=[0, 2], command=command)
    secret = secret_file(run, f"127.0.0.1:{job.port}")
    assert job.wait_for(lambda: listening(job) and secret.exists()), job.output[-4000:]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    silent = []
    for seed in range(200):
        attack(("127.0.0.1", job.port), seed, silent)
    late = Job(tmp_path, [f"run_dir={run}"], 3, present=[1], command=command, port=job.port)
    job.processes.insert(1, late.processes[0])
    job.outputs.insert(1, late.outputs[0])
    assert job.wait_for(lambda: job.output.count("ready") == 3), job.output[-4000:]
    assert "connections without the job's secret" in job.output
    assert len(silent) > 10 and not run.parent.exists() and not listening(job)
    job.processes[0].kill()
    assert job.wait(100) == [-signal.SIGKILL, RESTART, RESTART], job.output[-3000:]  # JAX's heartbeats need 120 s
    for path in job.outputs[1:]:
        assert "process 0 (" in path.read_text() and "died without a message" in path.read_text()


def test_a_process_that_never_comes_is_named_in_time(tmp_path, cache):
    job = Job(tmp_path, arguments(tmp_path / "run", cache, *USUAL, "hosts.join_seconds=3"), 3, present=[0, 2])
    assert job.wait(90) == [RESTART, RESTART]
    for path in job.outputs:
        assert "Process 1 of 3 did not join" in path.read_text() and "Traceback" not in path.read_text()


UNLUCKY = """
import resource, sys, tempfile
from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.cli import run_command
from mstrain.commands.train import COMMAND
save, temporary_file = Checkpoints.save, tempfile.TemporaryFile
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
def full(**_):
    raise OSError(28, "No space left on device")
def unlucky_save(self, step, *rest):
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000 if step == 2 else soft, hard))
    tempfile.TemporaryFile = full if step == 4 else temporary_file
    save(self, step, *rest)
if sys.argv[-1] == "process=1":
    Checkpoints.save = unlucky_save
run_command(COMMAND)
"""


def test_a_job_survives_saves_that_fail_on_one_host_and_ends_when_one_dies(tmp_path, cache):
    """Of process 1's files, those of step 2 are refused while they are written and those of step 4 before."""
    run = tmp_path / "run"
    words = arguments(
        run, cache, "steps=100000", "mesh=2x2x2", "shard=optimizer", "eval.every=100", "checkpoint.every=2"
    )
    job = Job(tmp_path, words, 2, command=[sys.executable, "-c", UNLUCKY])
    assert job.wait_for(lambda: any(saved(run))), job.output[-4000:]
    assert [step for step in saved(run) if step][0] == 6 and not manifest.problems(run / "checkpoints" / "6")
    hosts = manifest.read(run / "checkpoints" / "6")["hosts"]
    assert len(hosts) == 2 and all(host["bytes"] > 10_000 and host["limit_seconds"] > 120 for host in hosts)
    assert not [*(run / "checkpoints").glob("[24].*")]
    first, second = (path.read_text(errors="replace") for path in job.outputs)
    assert "saving step 2 failed (1 in a row): OSError: process 1 (" in first
    for text in (first, second):
        assert "saving step 4 failed (2 in a row): OSError: process 1 (" in text
        assert "No space left on device" in text

    job.processes[1].kill()
    assert job.wait(100) == [RESTART, -signal.SIGKILL], job.output[-3000:]
    survivor = job.outputs[0].read_text()
    assert "process 1 (" in survivor and "died without a message" in survivor
    assert not manifest.problems(run / "checkpoints" / str(saved(run)[-1]))


def test_a_third_signal_ends_at_once(tmp_path, cache):
    run = tmp_path / "run"
    # The fourth batch never arrives, so the step that the first signal waits for never ends.
    command = [sys.executable, "-c", (
        "import time, sys; sys.path.insert(0, '.');"
        "from mstrain.data import Batches; original = Batches.batch;"
        "Batches.batch = lambda self, step, rows=slice(None): time.sleep(3600) if step == 3 else "
        "original(self, step, rows);"
        "from mstrain.commands.train import COMMAND; from mstrain.cli import run_command; run_command(COMMAND)"
    )]  # fmt: skip
    job = Job(tmp_path, arguments(run, cache, *USUAL), command=command)
    assert job.wait_for(lambda: len(rows(run)) >= 2), job.output[-4000:]
    job.send(signal.SIGTERM)
    assert job.wait_for(lambda: "stopping after this step" in job.output, 20)
    job.send(signal.SIGTERM)
    assert job.wait_for(lambda: "still stopping" in job.output, 20)
    job.send(signal.SIGTERM)
    assert job.wait(20) == [SIGNALED + signal.SIGTERM]
    assert saved(run) == [0]
