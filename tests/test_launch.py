"""What the launchers do with every exit code: the scripts run in bash, with stubs for the programs they call."""

import os
import re
import shlex
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
    # One worker reports the code, as its shell would; where REPORTED is empty, gcloud passes it on.
    "gcloud": 'if [ "$4" = ssh ]; then echo "gcloud $*" >>"$CALLS"; if [ -z "$REPORTED" ]; then ' + NEXT + "; fi; "
    'echo "a line"; echo "mstrain-exit-code=$(head -n 1 "$CODES")"; sed -i 1d "$CODES"; exit 1; fi; '
    'echo describe >>"$CALLS"; '
    'state=$(head -n 1 "$STATES"); sed -i 1d "$STATES"; echo "${state:-READY}"',
    "sleep": ':',
}  # fmt: skip


@pytest.fixture
def launch(tmp_path):
    """Runs a script of launch/; gives its exit code, the calls of the stubs and what it printed."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
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
            ["bash", *words], cwd=tmp_path, env={**os.environ, "PATH": path, **files, **environment},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "codes, state, requeued",
    [
        ([FINISHED], "RUNNING", 0),
        ([UNRECOVERABLE], "RUNNING", 0),
        ([CONFIGURATION], "RUNNING", 0),
        ([127], "RUNNING", 0),
        ([STOPPED] * 5, "RUNNING", 5),
        ([STOPPED], "CANCELLED", 0),
        ([RESTART] * 5, "RUNNING", 2),
        ([KILLED, RESTART, STOPPED, KILLED, RESTART, KILLED], "RUNNING", 5),
    ],
)
def test_slurm_requeues_what_a_restart_helps(launch, codes, state, requeued):
    variables = {"SLURM_JOB_ID": "77", "STATE": state, "MAX_RESTARTS": "2"}
    for number, code in enumerate(codes):
        ended, calls, shown = launch(["launch/train.slurm", "mesh=2x4", "sample.prompt=a b"], [code], **variables)
        assert ended == code and ("scontrol requeue 77" in calls) == (number < requeued), shown
        assert calls[0].endswith(".venv/bin/python train.py mesh=2x4 sample.prompt=a b")


def test_failures_far_apart_are_not_in_a_row(launch):
    variables = {"SLURM_JOB_ID": "77", "STATE": "RUNNING", "MAX_RESTARTS": "1", "LONG_SECONDS": "0"}
    for _ in range(3):
        assert "scontrol requeue 77" in launch(["launch/train.slurm"], [RESTART], **variables)[1]
    codes = [RESTART] * 4 + [FINISHED]
    assert launch(["launch/tpu.sh", "slice", "zone-a"], codes, MAX_RESTARTS="1", LONG_SECONDS="0")[0] == FINISHED


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
        ([RESTART] * 2 + [STOPPED] + [RESTART] * 9, 6, RESTART),
    ],
)
def test_a_tpu_slice_is_started_again_while_that_helps(launch, codes, starts, ended):
    words = ["launch/tpu.sh", "slice", "zone-a", "mesh=2x4", "sample.prompt=it's 5 o'clock"]
    code, calls, shown = launch(words, codes, MAX_RESTARTS="2")
    assert code == ended and len([call for call in calls if call.startswith("gcloud")]) == starts, shown


def test_what_the_workers_report_counts_more_than_what_gcloud_makes_of_it(launch):
    words = ["launch/tpu.sh", "slice", "zone-a"]
    code, calls, shown = launch(words, [STOPPED, RESTART, CONFIGURATION], REPORTED="yes")
    assert code == CONFIGURATION and len([call for call in calls if call.startswith("gcloud")]) == 3
    assert "a line" in shown and "mstrain-exit-code" not in shown


def test_the_line_for_a_worker_runs_the_command_and_reports_its_exit_code(launch, tmp_path):
    _, _, shown = launch(["launch/tpu.sh", "--dry-run", "slice", "zone-a", "sample.prompt=it's 5"])
    (tmp_path / "mstrain" / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / "mstrain" / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 85\n')
    python.chmod(stat.S_IRWXU)
    (word,) = [word for word in shlex.split(shown) if word.startswith("--command=")]
    done = subprocess.run(["sh", "-c", word.removeprefix("--command=")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 85 and done.stdout == "train.py|sample.prompt=it's 5|mstrain-exit-code=85\n"


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
