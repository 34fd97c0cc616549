"""plan.py for clusters of unequal devices: its plans, and the messages about its input files."""

import functools
import json
import shutil

import pytest

from mstrain.commands import plan
from tests.typed import exit_code

command = functools.partial(exit_code, plan.COMMAND)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Folder of synthetic inputs, written by plan.py from the nine sample profiles that it carries."""
    root = tmp_path_factory.mktemp("mixed")
    assert command("experiment=metis_inputs", f"run_dir={root}") == 0
    return root


def files(root, **changed) -> list[str]:
    paths = {
        "hostfile": root / "hostfile",
        "clusterfile": root / "clusterfile.json",
        "profiles": root / "profiles",
    }
    return [f"{key}={path}" for key, path in (paths | changed).items()]


def test_metis_prints_the_lines_of_the_reference_and_writes_json(mixed, tmp_path, capsys):
    assert command("planner=metis", *files(mixed), "num_layers=10", "gbs=128", f"run_dir={tmp_path}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Average time: ") and lines[1] == "count: 612"
    assert lines[2].startswith("rank, cost, node_sequence") and lines[3].startswith("1, 1793.6")
    assert json.loads((tmp_path / "metis.json").read_text())["count"] == 612


def test_metis_takes_the_options_of_the_reference(mixed, tmp_path, capsys):
    options = ["use_strat=true", "device_order=[V100,A100]", "max_permute_len=128"]
    assert command("planner=metis", *files(mixed), "num_layers=10", "gbs=128", f"run_dir={tmp_path}", *options) == 0
    assert "count: 562" in capsys.readouterr().out


def test_metis_stopped_by_its_budget_keeps_what_it_found(mixed, tmp_path, capsys):
    arguments = [*files(mixed), "num_layers=10", "gbs=128", f"run_dir={tmp_path}", "max_plans=20"]
    assert command("planner=metis", *arguments) == 0
    found = json.loads((tmp_path / "metis.json").read_text())
    assert found["exhausted"] and found["inter_stage_plans"] == 20 and found["ranking"]
    assert "not exhaustive. Type a larger max_seconds or max_plans" in capsys.readouterr().out


def test_metis_stopped_by_a_missing_profile_keeps_what_it_found(mixed, tmp_path, capsys):
    arguments = [*files(mixed), "num_layers=10", "gbs=24", f"run_dir={tmp_path}"]
    assert command("planner=metis", *arguments) == 2
    message = capsys.readouterr().err
    assert "is missing" in message and "not divisible" in message and str(tmp_path / "metis.json") in message
    assert json.loads((tmp_path / "metis.json").read_text())["options"]["gbs"] == 24


def test_optimal_is_the_default_for_mixed_clusters(mixed, tmp_path, capsys):
    assert command(*files(mixed), "num_layers=10", "batch=128", f"run_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert printed.count("several lines of the host file count as one host per line: 0.0.0.1 (4), 0.0.0.4 (4).") == 1
    assert "proven optimal" in printed and "gap 0.00 %" in printed and "train.py cannot run these plans" in printed
    result = json.loads((tmp_path / "optimal.json").read_text())
    assert sum(result["plans"][0]["stages"][0]["devices"].values()) >= 1
    assert (tmp_path / "optimal.csv").read_text().startswith("rank,")


# What is done to a good mixed cluster, and words of the message: the file, its line or entry, the fix.
BAD_INPUTS = {
    "missing host": (("hostfile", "9.9.9.9 slots=4\n"), ["hostfile:1", "9.9.9.9", "add an entry"]),
    "malformed line": (("hostfile", "0.0.0.1 slots=4\n0.0.0.4 four\n"), ["hostfile:2", "ADDRESS slots=K"]),
    "many digits": (("hostfile", f"0.0.0.1 slots={'9' * 5000}\n"), ["hostfile:1", "...; write ADDRESS slots=K"]),
    "no devices": (("hostfile", "0.0.0.1 slots=0\n"), ["hostfile:1", "slots=1 or more"]),
    "empty": (("hostfile", "\n# nobody\n"), ["hostfile", "no hosts"]),
    "not JSON": (("clusterfile.json", "{"), ["clusterfile.json: line 1", "not JSON"]),
    "zero memory": (
        ("clusterfile.json", ("memory", 0)),
        ["clusterfile.json", "memory is 0", "positive number"],
    ),
    "bytes for gigabytes": (("clusterfile.json", ("inter_bandwidth", 1e10)), ["bytes/s", "write GB/s"]),
    "unknown type": (("clusterfile.json", ("instance_type", "X9")), ["no profile of type X9", "A100"]),
    "absent field": (
        ("profiles/DeviceType.A100_tp1_bs1.json", "{}"),
        ["DeviceType.A100_tp1_bs1.json", "is missing"],
    ),
    "other model": (None, ["num_layers=10"]),
    "nothing fits": (("clusterfile.json", ("memory", 1e-6)), ["memory", "add"]),
}


@pytest.mark.parametrize("planner", ["optimal", "metis"])
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_bad_file_is_named_with_its_line_and_fix(case, planner, mixed, tmp_path, capsys):
    change, words = BAD_INPUTS[case]
    root = tmp_path / "inputs"
    shutil.copytree(mixed, root)
    if change:
        path, content = root / change[0], change[1]
        if isinstance(content, tuple):
            entries = json.loads(path.read_text())
            for entry in entries.values():
                entry[content[0]] = content[1]
            content = json.dumps(entries)
        path.write_text(content)
    layers = 11 if case == "other model" else 10
    batch = "gbs=128" if planner == "metis" else "batch=128"
    keys = [*files(root), f"num_layers={layers}", batch, f"run_dir={tmp_path}", "max_seconds=20"]
    assert command(f"planner={planner}", *keys) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message and all(word in message for word in words), message


def test_an_absent_profile_key_is_named(mixed, tmp_path, capsys):
    root = tmp_path / "inputs"
    shutil.copytree(mixed, root)
    (root / "profiles" / "DeviceType.V100_tp4_bs8.json").unlink()
    assert command("planner=metis", *files(root), "num_layers=10", "gbs=128", f"run_dir={tmp_path}") == 2
    message = capsys.readouterr().err
    assert "DeviceType.V100_tp4_bs8.json is missing: add it" in message and "metis.json" in message
    assert command("planner=optimal", *files(root), "num_layers=10", "batch=128", f"run_dir={tmp_path}") == 0


def test_a_batch_that_metis_cannot_divide_is_planned_by_the_optimal_planner(mixed, tmp_path):
    assert command(*files(mixed), "num_layers=10", "batch=37", f"run_dir={tmp_path}", "max_seconds=20") == 0
    plan = json.loads((tmp_path / "optimal.json").read_text())["plans"][0]
    assert plan["microbatch"] * plan["microbatches"] >= 37


def test_the_optimal_search_out_of_time_says_what_it_knows(mixed, tmp_path, capsys):
    assert command(*files(mixed), "num_layers=10", "batch=128", f"run_dir={tmp_path}", "max_seconds=1e-9") in (0, 2)
    said = capsys.readouterr()
    assert "not exhaustive" in said.out or "raise max_seconds" in said.err
