"""A sweep runs every combination of the values that are typed, and stops with its run."""

import signal
import subprocess
import sys
import time

import pytest
from omegaconf import OmegaConf

from mstrain.cli import run_command
from mstrain.commands.evaluate import COMMAND as EVALUATE
from mstrain.commands.train import COMMAND
from mstrain.job.exit_codes import STOPPED
from tests.typed import SMALL, exit_code


def test_a_sweep_runs_every_combination_in_its_own_folder(tmp_path, monkeypatch, capfd):
    arguments = [*SMALL, "-m", "seed=1,2", "parallel=fsdp,wang", f"run_dir={tmp_path / 'sweep'}"]
    started = []
    monkeypatch.setattr("mstrain.cli.sweep._Child.run", lambda self, name, pairs, folder: started.append(pairs) or 0)
    assert exit_code(COMMAND, *arguments) == 0
    folders = {pair.partition("=")[2] for pairs in started for pair in pairs if pair.startswith("run_dir=")}
    assert folders == {f"{tmp_path}/sweep/seed={s}_parallel={p}" for s in (1, 2) for p in ("fsdp", "wang")}
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 5
    assert exit_code(COMMAND, *SMALL, "-m", "seed=1,2", "steps=0") == 2  # before anything starts
    assert exit_code(COMMAND, *SMALL, "-m", "seed=1") == 2
    assert len(started) == 4
    capfd.readouterr()
    assert exit_code(COMMAND, *SMALL, "-m", "seed=1,2", "--cfg", "job") == 0 and len(started) == 4
    printed = [OmegaConf.create(part) for part in capfd.readouterr().out.split("---\n")]
    assert [config.seed for config in printed] == [1, 2]
    assert exit_code(COMMAND, "-m", f"run_dir={tmp_path}/a,{tmp_path}/b", "seed=1") == 0
    assert [pairs[-1] for pairs in started[4:]] == [f"run_dir={tmp_path}/a", f"run_dir={tmp_path}/b"]
    assert exit_code(COMMAND, "-m", "data=text", "data.path='a,b','a b'") == 2  # one folder for both
    with pytest.raises(SystemExit):
        run_command(EVALUATE, ["-m", "run_dir=one,two", "mesh=2x4"])
    assert started[6:] == [["run_dir=one", "mesh=2x4"], ["run_dir=two", "mesh=2x4"]]


def test_a_signal_to_a_sweep_stops_its_run_and_the_sweep(tmp_path):
    """The current run gets the signal and ends with 85; the next one is not started."""
    script = tmp_path / "run"
    script.write_text(f"#!/bin/sh\ntrap 'exit {STOPPED}' TERM\ntouch {tmp_path}/ready\nwhile :; do sleep 0.05; done\n")
    script.chmod(0o755)
    program = (
        "import sys, types\nfrom mstrain.cli.sweep import plan_sweep, run_sweep\n"
        f"sys.executable = {str(script)!r}\nconfig = lambda pairs: types.SimpleNamespace(run_dir={str(tmp_path)!r})\n"
        "runs = plan_sweep(['seed=1,2'], config, 'run_dir')\n"
        "sys.exit(run_sweep('train', runs, None))"
    )
    sweep = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    while not (tmp_path / "ready").exists():
        assert sweep.poll() is None
        time.sleep(0.01)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(60) == STOPPED
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 2
