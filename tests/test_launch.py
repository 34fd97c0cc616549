"""What the launchers do with every exit code: the scripts run in bash, with stubs for the programs they call."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from mstrain.job import exit_codes
from mstrain.job.exit_codes import CONFIGURATION, FINISHED, RESTART, STOPPED, UNRECOVERABLE

ROOT = Path(__file__).resolve().parent.parent
KILLED = exit_codes.SIGNALED + 9

# Each stub writes its words to calls.txt; srun and `gcloud ... ssh` end with the next of CODES.
NEXT = 'code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"; exit "${code:-0}"'
STUBS = {
    "srun": f'echo "srun $*" >>"$CALLS"; {NEXT}',
    "scontrol": 'echo "scontrol $*" >>"$CALLS"; if [ "$2" = job ]; then echo "   JobState=$STATE Reason=None"; fi; '
    'if [ "$2" = hostnames ]; then printf "a\\nb\\n"; fi',
    "python": 'echo "python $*" >>"$CALLS"; trap "kill %1; echo saved >>$CALLS; exit 85" TERM; '
    'if [ "$STATE" = ENDING ]; then kill -TERM $PPID; sleep.real 30 & wait; fi; ' + NEXT,
    "gcloud": f'if [ "$4" = ssh ]; then echo "gcloud $*" >>"$CALLS"; {NEXT}; fi; echo describe >>"$CALLS"; '
    'state=$(head -n 1 "$STATES"); sed -i 1d "$STATES"; echo "${state:-READY}"',
    "sleep": ':',
}  # fmt: skip


@pytest.fixture
def launch(tmp_path):
    """Runs a script of launch/; gives its exit code, the calls of the stubs and what it printed."""
    (tmp_path / "sleep.real").symlink_to(shutil.which("sleep"))
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)

    def run(words, codes=(), states=(), **environment):
        for name, lines in (("codes", codes), ("states", states), ("calls", ())):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        files = {name.upper(): str(tmp_path / name) for name in ("codes", "states", "calls")}
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", *words], cwd=ROOT, env={**os.environ, "PATH": path, **files, **environment},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "code, state, restarts, requeued",
    [
        (FINISHED, "RUNNING", "", False),
        (UNRECOVERABLE, "RUNNING", "", False),
        (CONFIGURATION, "RUNNING", "", False),
        (127, "RUNNING", "", False),
        (STOPPED, "RUNNING", "500", True),
        (STOPPED, "CANCELLED", "", False),
        (RESTART, "RUNNING", "", True),
        (RESTART, "RUNNING", "20", False),
        (KILLED, "RUNNING", "3", True),
        (KILLED, "RUNNING", "20", False),
    ],
)
def test_slurm_requeues_what_a_restart_helps(launch, code, state, restarts, requeued):
    variables = {"SLURM_JOB_ID": "77", "STATE": state, **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}
    words = ["launch/train.slurm", "mesh=2x4", "sample.prompt=a b"]
    ended, calls, _ = launch(words, [code], **variables)
    assert ended == code and ("scontrol requeue 77" in calls) == requeued
    assert calls[0].startswith("srun ") and calls[0].endswith(".venv/bin/python train.py mesh=2x4 sample.prompt=a b")


def test_slurm_continues_on_the_nodes_left_and_passes_the_signal_on(launch, tmp_path):
    variables = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHON": "python"}
    code, calls, shown = launch(["launch/elastic.slurm", "mesh=2x4"], [RESTART], **variables, STATE="RUNNING")
    assert code == RESTART and "scontrol requeue 77" in calls, shown
    (started,) = [call for call in calls if call.startswith("python")]
    assert started.startswith("python -m mstrain supervise hosts=a,b launch=srun --overlap --nodes=1")
    assert started.endswith("--nodelist={host} sh -c mesh=2x4")
    code, calls, shown = launch(["launch/elastic.slurm"], **variables, STATE="ENDING")
    assert code == STOPPED and "saved" in calls, shown


@pytest.mark.parametrize(
    "codes, starts, ended",
    [
        ([FINISHED], 1, FINISHED),
        ([CONFIGURATION], 1, CONFIGURATION),
        ([UNRECOVERABLE], 1, UNRECOVERABLE),
        ([STOPPED, RESTART, 255, FINISHED], 4, FINISHED),
        ([RESTART, CONFIGURATION], 2, CONFIGURATION),
        ([255, CONFIGURATION, STOPPED, FINISHED], 4, FINISHED),
        ([255, STOPPED, CONFIGURATION], 3, CONFIGURATION),
        ([STOPPED] * 4 + [RESTART] * 9, 7, RESTART),
    ],
)
def test_a_tpu_slice_is_started_again_while_that_helps(launch, codes, starts, ended):
    words = ["launch/tpu.sh", "slice", "zone-a", "mesh=2x4", "sample.prompt=it's 5 o'clock"]
    code, calls, shown = launch(words, codes, MAX_RESTARTS="2")
    assert code == ended and len([call for call in calls if call.startswith("gcloud")]) == starts, shown


def test_a_tpu_slice_is_waited_for_until_it_is_ready_or_too_late(launch):
    code, calls, _ = launch(["launch/tpu.sh", "slice", "zone-a"], [STOPPED, FINISHED], ["PREEMPTED", "CREATING"])
    assert code == FINISHED and calls.count("describe") == 3
    code, calls, shown = launch(["launch/tpu.sh", "slice", "zone-a"], [STOPPED], ["PREEMPTED"] * 9, WAIT_MINUTES="3")
    assert code == STOPPED and calls.count("describe") == 4 and "Create it again" in shown


def test_a_dry_run_prints_the_line_and_starts_nothing(launch):
    code, calls, shown = launch(["launch/tpu.sh", "--dry-run", "slice", "zone-a", "run_dir=/a b"])
    assert code == 0 and calls == [] and shown.startswith("gcloud compute tpus tpu-vm ssh slice")
    assert launch(["launch/tpu.sh", "slice"])[0] == CONFIGURATION


def jobset_action(code=None, condition=None):
    """What the JobSet does when a pod ends with `code` or is disrupted, by the rules of Kubernetes and JobSet."""
    spec = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    containers = [container["name"] for container in job["template"]["spec"]["containers"]]
    assert job["template"]["spec"]["restartPolicy"] == "Never" and job["backoffLimit"] == 0  # what the policy needs
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        assert not exits or (exits["containerName"] in containers and exits["operator"] == "In")
        if (exits and code in exits["values"]) or {"type": condition, "status": "True"} in conditions:
            reason, message = "PodFailurePolicy", f"... matching {rule['action']} rule at index {index}"
            break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"  # counts towards maxRestarts


@pytest.mark.parametrize(
    "code, action",
    [
        (UNRECOVERABLE, "FailJobSet"),
        (CONFIGURATION, "FailJobSet"),
        (STOPPED, "RestartJobSetAndIgnoreMaxRestarts"),
        (RESTART, "RestartJobSet"),
        (KILLED, "RestartJobSet"),
    ],
)
def test_a_jobset_restarts_what_a_restart_helps(code, action):
    assert jobset_action(code) == action
    assert jobset_action(condition="DisruptionTarget") == "RestartJobSetAndIgnoreMaxRestarts"


def test_the_table_of_exit_codes_is_that_of_the_documentation():
    table = [line for line in exit_codes.__doc__.splitlines() if line.startswith("|")]
    assert "\n".join(table) in (ROOT / "docs" / "operations.md").read_text()
    numbers = {FINISHED, UNRECOVERABLE, CONFIGURATION, RESTART, STOPPED}
    assert {int(line.split("|")[1]) for line in table if re.match(r"\| \d+ \|", line)} == numbers
    assert [code for code in (*sorted(numbers), KILLED, -9) if exit_codes.restartable(code)] == [75, 85, KILLED, -9]
