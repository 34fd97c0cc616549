"""Where a process finds its place, and the scripts that start jobs, as far as a machine without a cluster can
tell."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from mstrain.job.job import ALONE, HostsConfig, Job
from mstrain.job.process_info import VARIABLES, ProcessInfo, find_process

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[003-006]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in [*VARIABLES, *SLURM]:
        monkeypatch.delenv(name, raising=False)


def environment(monkeypatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_alone_without_a_cluster():
    assert find_process(None, None, None) == (None, None)


def test_keys_come_before_the_environment(monkeypatch):
    environment(monkeypatch, dict(zip(VARIABLES, ("elsewhere:1", "9", "8"), strict=True)))
    assert find_process("here:2", 2, 1) == (ProcessInfo("here:2", 2, 1), None)


@pytest.mark.parametrize("given", [("a:1", None, None), ("a:1", 2, None), (None, 2, 0), (None, None, 0)])
def test_keys_belong_together(given):
    with pytest.raises(ValueError, match="must be given together. Type "):
        find_process(*given)


def test_variables_of_a_job_set(monkeypatch):
    environment(monkeypatch, dict(zip(VARIABLES, ("mstrain-workers-0-0.mstrain:8476", "4", "3"), strict=True)))
    assert find_process(None, None, None) == (ProcessInfo("mstrain-workers-0-0.mstrain:8476", 4, 3), None)


def test_variables_that_make_no_sense_are_refused(monkeypatch):
    environment(monkeypatch, dict(zip(VARIABLES, ("host:1", "four", "0"), strict=True)))
    with pytest.raises(ValueError, match="The environment has"):
        find_process(None, None, None)


def test_slurm_with_one_process_per_node_gives_it_all_devices(monkeypatch):
    environment(monkeypatch, SLURM)
    found, devices = find_process(None, None, None)
    assert (found.processes, found.process, found.address[0], devices) == (4, 2, "node003", None)


def test_slurm_with_several_processes_per_node_gives_each_its_device(monkeypatch):
    environment(monkeypatch, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"})
    assert find_process(None, None, None)[1] == [1]


def test_one_slurm_task_is_no_job(monkeypatch):
    environment(monkeypatch, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert find_process(None, None, None) == (None, None)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_times_must_be_times(seconds):
    with pytest.raises(ValueError, match="Type hosts.silent_seconds=60"):
        HostsConfig(silent_seconds=seconds)


def test_a_process_with_another_value_is_named():
    class FixedValues(Job):
        def all_gather(self, name, value):
            return [value, value, "another"]

    job = FixedValues(None, HostsConfig(), {2: "third"}, {})
    with pytest.raises(ValueError, match=r"process 2 \(third\): different corpus from process 0"):
        job.agree("corpus", "one")
    ALONE.agree("corpus", "one")


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.iterdir() if path.suffix != ".yaml"))
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)


def test_the_slurm_script_runs_train_with_its_arguments(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", LAUNCH / "train.slurm", "parallel.layers=0-1:fsdp 2:summa"],
        env=path,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[-2:] == ["train.py", "parallel.layers=0-1:fsdp 2:summa"]
    directives = re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", (LAUNCH / "train.slurm").read_text(), re.MULTILINE)
    assert dict(directives)["ntasks-per-node"] == "1" and dict(directives)["signal"].startswith("TERM@")


def test_the_job_set_gives_every_pod_its_seat(monkeypatch):
    (job,) = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables.keys() == set(VARIABLES) and spec["completionMode"] == "Indexed"
    for index in range(spec["completions"]):
        environment(monkeypatch, {**variables, "JAX_PROCESS_ID": str(index)})
        found, _ = find_process(None, None, None)
        assert (found.process, found.processes) == (index, spec["completions"])
        assert spec["parallelism"] == found.processes
        assert found.address[1] == container["ports"][0]["containerPort"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60


def test_the_tpu_line_passes_arguments_through_two_shells():
    words = ["mesh=2x4", "parallel.layers=0-1:fsdp 2:summa", "run_dir=/a b"]
    done = subprocess.run(
        ["bash", LAUNCH / "tpu.sh", "--dry-run", "pod", "europe-west4-b", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    line = shlex.split(done.stdout)
    assert line[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh"] and "--worker=all" in line
    (command,) = [word.removeprefix("--command=") for word in line if word.startswith("--command=")]
    assert shlex.split(command.partition(";")[0])[-3:] == words
    assert subprocess.run(["bash", LAUNCH / "tpu.sh"], capture_output=True, check=False).returncode == 2
