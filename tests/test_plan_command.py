"""plan.py as a person meets it: its modes end in files and a printed answer, its mistakes in one message and exit code 2."""

import json
import sys

import pytest

import plan
from mstrain.config import run_command
from mstrain.planning.commands.modes import choose
from tests.planning.metis.conftest import load_golden, sample_documents


def command(*arguments: str) -> int:
    """Exit code of plan.py, as `run_command` decides it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["plan.py", *arguments])
        run_command("plan", plan.main, plan.help_lines)
    return ended.value.code


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, request):
    """Folder of synthetic inputs, written by plan.py from the nine sample profiles."""
    root = tmp_path_factory.mktemp("mixed")
    (root / "samples").mkdir()
    for (tp, batch), document in sample_documents(load_golden(request.config)).items():
        (root / "samples" / f"DeviceType.A100_tp{tp}_bs{batch}.json").write_text(json.dumps(document))
    assert command("experiment=metis_inputs", f"samples={root / 'samples'}", f"run_dir={root}") == 0
    return root


def files(root, **changed) -> list[str]:
    paths = {"hostfile": root / "hostfile", "clusterfile": root / "clusterfile.json", "profiles": root / "profiles"}
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
    assert "raise max_seconds or max_plans" in capsys.readouterr().out


def test_metis_stopped_by_a_missing_profile_keeps_what_it_found(mixed, tmp_path, capsys):
    arguments = [*files(mixed), "num_layers=10", "gbs=24", f"run_dir={tmp_path}"]
    assert command("planner=metis", *arguments) == 2
    message = capsys.readouterr().err
    assert "is missing" in message and "not divisible" in message and str(tmp_path / "metis.json") in message
    assert json.loads((tmp_path / "metis.json").read_text())["options"]["gbs"] == 24


def test_optimal_is_the_default_for_mixed_clusters(mixed, tmp_path, capsys):
    assert command(*files(mixed), "num_layers=10", "batch=128", f"run_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "proven optimal" in printed and "gap 0.00 %" in printed and "train.py runs none of these plans" in printed
    result = json.loads((tmp_path / "optimal.json").read_text())
    assert sum(result["plans"][0]["stages"][0]["devices"].values()) >= 1
    assert (tmp_path / "optimal.csv").read_text().startswith("rank,")


def test_distir_experiment_writes_tables_plots_and_a_trace(tmp_path, capsys):
    assert command("experiment=distir_mlp", "rules=notebook", "trials=1", f"run_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "rules notebook" in printed and "55313.0 samples/s" in printed
    assert json.loads((tmp_path / "summary.json").read_text())["plans"] == 52
    for name in ("grid_search.csv", "grid_search.json", "grid_search.pdf", "best_pipeline.json.gz"):
        assert (tmp_path / name).stat().st_size > 0


def test_modes_are_chosen_by_key_by_host_file_or_by_default():
    assert choose(["batch=8"]) == ("planner", "pod", ["batch=8"])
    assert choose(["hostfile=x"])[1] == "optimal"
    assert choose(["planner=metis", "hostfile=x"]) == ("planner", "metis", ["hostfile=x"])
    assert choose(["profile=tiny", "seq=8"]) == ("profile", "model", ["model=tiny", "seq=8"])


def test_help_lists_the_keys_of_the_mode(capsys):
    assert command("planner=metis", "--help") == 0
    printed = capsys.readouterr().out
    assert "max_permute_len" in printed and "clusterfile: JSON object" in printed
