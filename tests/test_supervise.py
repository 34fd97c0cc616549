"""mstrain supervise: what it does after each exit code, and a run of three hosts that continues on two.

Hosts are the addresses 127.0.0.1 to 127.0.0.4. A script stands for ssh: it fails for a host that is marked as dead.
"""

import functools
import json
import os
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from mstrain.commands.supervise import newest_step
from mstrain.job.exit_codes import CONFIGURATION, FINISHED, RESTART, STOPPED
from mstrain.job.supervisor import SuperviseConfig, Supervisor
from tests.job.processes import ROOT, arguments, free_port
from tests.quick import QUICK_FLAGS

HOSTS = [f"127.0.0.{i}" for i in range(1, 5)]
SSH = """#!/bin/sh
cd {folder}
[ -e dead.$1 ] && exit 255
[ "$2" = true ] && exit 0
echo $$ >pid.$1
cd {root}
exec sh -c "$2"
"""


@pytest.fixture
def ssh(tmp_path):
    path = tmp_path / "ssh"
    path.write_text(SSH.format(folder=tmp_path, root=ROOT))
    path.chmod(stat.S_IRWXU)
    return f"{path} {{host}}"


def lose(folder, host):
    """The host is gone, and so is its process."""
    (folder / f"dead.{host}").touch()
    os.kill(int((folder / f"pid.{host}").read_text()), signal.SIGKILL)


def end(supervisor):
    """Ends the job of a test that failed."""
    for _ in range(3):
        if supervisor.poll() is None:
            supervisor.terminate()
            time.sleep(1)


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    return [row["loss"] for row in rows]


def test_a_run_of_three_hosts_continues_on_two_with_the_same_curve(tmp_path, ssh, request):
    """The lost host is the coordinator's, which held run_dir."""
    run, shared = tmp_path / "run", ["batch=12", "steps=20", "checkpoint.every=2", "eval.every=100"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS, "PYTHONUNBUFFERED": "1"}
    environment.pop("NPROC", None)
    words = arguments(run, tmp_path / "cache", "mesh=3x1x1", *shared)
    own = [f"hosts={','.join(HOSTS[:3])}", f"launch={ssh}", f"port={free_port()}", "wait_seconds=0"]
    with open(tmp_path / "output", "w") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "mstrain", "supervise", *own, *words], cwd=ROOT, env=environment, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    request.addfinalizer(lambda: end(supervisor))
    deadline = time.monotonic() + 240
    while (newest_step(run) or 0) < 4:
        assert supervisor.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.01)
    lose(tmp_path, HOSTS[0])
    code = supervisor.wait(240)
    shown = (tmp_path / "output").read_text()
    assert code == FINISHED, shown
    assert "127.0.0.1 does not answer and is left out" in shown
    assert "starting on 2 hosts, mesh=data2-row1-col1 accumulate=2" in shown
    alone = arguments(tmp_path / "alone", tmp_path / "cache", "mesh=1x1", *shared)
    subprocess.run(
        [sys.executable, "-m", "mstrain", "train", *alone], cwd=ROOT, env=environment, check=True, timeout=240,
        capture_output=True,
    )  # fmt: skip
    np.testing.assert_allclose(losses(run), losses(tmp_path / "alone"), rtol=1e-5)


def test_a_resume_from_local_checkpoints_counts_as_progress(tmp_path):
    assert newest_step(tmp_path) is None
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "history.jsonl").write_text('{"after_step": 0}\n{"after_step": 6}\n{"after_st')
    assert newest_step(tmp_path) == 6


def supervise(ssh, codes, saves=(), **changes):
    """Runs a Supervisor whose process i of attempt n ends with codes[n][i]; its exit code, attempts and messages.

    `saves`: the attempts that write a checkpoint.
    """
    attempts, messages = [], []

    def lines(hosts):
        attempts.append(hosts)
        return [f"exit {code}" for code in codes[len(attempts) - 1]]

    def newest():
        return len([number for number in saves if number < len(attempts)])

    config = SuperviseConfig(",".join(HOSTS), ssh, wait_seconds=0, **changes)
    return Supervisor(config, lines, newest, messages.append).run(), attempts, messages


def test_what_a_restart_helps_is_restarted_and_nothing_else(ssh):
    assert supervise(ssh, [[0] * 4])[0] == FINISHED
    assert len(supervise(ssh, [[2, 2, 2, 2]])[1]) == 1
    code, attempts, _ = supervise(ssh, [[85] * 4, [75, 255, 75, 75], [0, 75, 75, 75], [75, 75, 75, 2]])
    assert code == CONFIGURATION and len(attempts) == 4


def test_failures_without_a_new_checkpoint_end_it_and_those_with_one_do_not(ssh):
    assert supervise(ssh, [[75] * 4] * 9, max_failures=3)[0] == RESTART
    code, attempts, _ = supervise(ssh, [*[[75] * 4] * 8, [0] * 4], saves=(1, 3, 5, 7), max_failures=2)
    assert code == FINISHED and len(attempts) == 9


def test_a_host_on_which_the_process_dies_again_and_again_is_left_out(ssh):
    code, attempts, messages = supervise(ssh, [[75, 75, 137, 75], [75, 75, 139, 75], [0] * 3])
    assert code == FINISHED and attempts[2] == [HOSTS[i] for i in (0, 1, 3)]
    assert "127.0.0.3 fails repeatedly and is left out" in messages


def test_a_signal_is_passed_on_and_the_job_that_saved_ends_with_its_code(tmp_path, ssh):
    trap = f"trap 'exit {STOPPED}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    program = (
        "from mstrain.job.supervisor import *\n"
        f"config = SuperviseConfig('127.0.0.1', {ssh!r}, wait_seconds=0)\n"
        f"raise SystemExit(Supervisor(config, lambda hosts: [{trap!r}], lambda: None, print).run())"
    )
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where the suite runs under nohup
    supervisor = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, preexec_fn=heard)
    while not (tmp_path / "ready").exists():
        assert supervisor.poll() is None
        time.sleep(0.01)
    supervisor.send_signal(signal.SIGHUP)
    assert supervisor.wait(60) == STOPPED


@pytest.mark.parametrize(
    "word", ["launch=ssh", "hosts=a,a", "port=0", "process=1", "mesh=auto", "mesh=3x1", "wait_seconds=-1"]
)
def test_a_mistake_is_refused_before_anything_starts(word, capsys):
    from mstrain.commands.supervise import main

    usual = ["hosts=a,b", "launch=ssh {host}", "mesh=2x1"]
    key = word.partition("=")[0]
    with pytest.raises(ValueError):
        main([*(pair for pair in usual if pair.partition("=")[0] != key), word])
    assert "starting" not in capsys.readouterr().out
