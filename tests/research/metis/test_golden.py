"""Counts, costs and best plans of the reference, plan for plan."""

import json
import time

import pytest

from mstrain.planner.mixed.profiles import profile_name, read_profiles
from research.metis import MetisOptions, run_metis
from research.metis.homogeneous import run_homogeneous
from research.metis.synthetic import write_profiles
from tests.research.metis.conftest import load_golden, sample_documents, write_clusterfile


def pytest_generate_tests(metafunc):
    """One test per golden run, so that a failure names the row, the walk and the order of types."""
    if "golden_run" in metafunc.fixturenames:
        configs = load_golden(metafunc.config)["configs"]
        runs = [(config["inputs"], run) for config in configs for run in config["runs"]]
        names = ["-".join((config["id"], run["mode"], run["first_node_sequence"][0], "first"))
                 for config in configs for run in config["runs"]]
        metafunc.parametrize("golden_run", runs, ids=names)


def search(inputs, golden_inputs: dict, run: dict, reference_profile: str):
    devices_per_type = int(golden_inputs["hostfile"].split()[1])
    names = ("num_layers", "gbs", "hidden_size", "sequence_length", "vocab_size", "max_profiled_tp_degree",
             "max_profiled_batch_size", "min_group_scale_variance", "max_permute_len")
    options = MetisOptions(**{name: golden_inputs[name] for name in names}, use_strat=run["use_strat"],
                           device_order=tuple(run["first_node_sequence"]),
                           reference_profile=reference_profile)
    return run_metis(*inputs(golden_inputs["num_layers"], devices_per_type), options)


def assert_same_plan(plan, expected: dict):
    assert plan.cost == pytest.approx(expected["cost"], rel=1e-12)
    assert list(plan.node_sequence) == expected["node_sequence"]
    assert list(plan.device_groups) == expected["device_groups"]
    assert [list(strategy) for strategy in plan.strategies] == expected["strategies_dp_tp"]
    assert plan.batches == expected["batches"]
    assert list(plan.layer_partition) == expected["layer_partition"]
    assert plan.num_stage == expected["num_stages_costed"]
    assert plan.partition_attempt == expected["partition_attempt"]


def test_run_reproduces_the_reference(inputs, golden_run):
    golden_inputs, run = golden_run
    started = time.process_time()
    result = search(inputs, golden_inputs, run, run["profile_reference_file"])
    assert time.process_time() - started < 30, "the largest row takes half an hour in the reference, 4 s here"
    assert (result.count, result.plans_costed) == (run["count"], run["plans_costed"])
    assert result.sum_of_costs == pytest.approx(run["sum_of_costs"], rel=1e-12)
    attempts = tuple(run["costed_by_partition_attempt"].get(str(attempt), 0) for attempt in (1, 2, 3))
    assert result.costed_by_attempt == attempts
    assert result.with_num_stage_mismatch == run["costed_with_num_stage_mismatch"]
    assert result.with_missing_layers == run["costed_with_missing_layers"]
    assert result.with_empty_stage == run["costed_with_empty_stage"]
    assert result.num_complete == run["num_complete"]
    assert_same_plan(result.best, run["best"])
    assert_same_plan(result.best_complete, run["best_complete"])
    assert not result.exhausted and result.plans_dropped == 0
    for file_name, other in run.get("best_with_other_reference_file", {}).items():
        result = search(inputs, golden_inputs, run, file_name)
        assert result.count == other["count"]
        assert_same_plan(result.best, other["best"])


@pytest.mark.parametrize("num_layers", [10, 20])
def test_synthetic_profiles_have_the_golden_numbers(golden, tmp_path, num_layers):
    expected = golden["synthetic_profile_checks"][str(num_layers)]
    assert write_profiles(tmp_path, sample_documents(golden), num_layers, 128) == expected["n_files"]
    documents = {path.name: json.loads(path.read_text())["execution_time"] for path in tmp_path.iterdir()}
    for name in ("total_time_ms", "forward_backward_time_ms"):
        total = sum(times[name] for times in documents.values())
        assert total == pytest.approx(expected[f"sum_{name}"], rel=1e-12)
    profiles = read_profiles(tmp_path)
    assert len(profiles) == expected["n_files"]
    for name, numbers in expected["files"].items():
        device_type, tp, batch = name.split("_")
        profile = profiles[device_type, int(tp[2:]), int(batch[2:])]
        ends = (profile.layer_ms[0], profile.layer_ms[1], profile.layer_ms[-1])
        assert ends == pytest.approx(numbers["layer_compute_first_mid_last"], rel=1e-12)
        assert profile.sync_ms == pytest.approx(numbers["fb_sync_as_loaded"], rel=1e-12)
        assert profile.optimizer_ms == pytest.approx(numbers["optimizer_time_ms"], rel=1e-12)
        assert sum(profile.parameter_bytes) == numbers["total_parameters_bytes"]
        assert sum(profile.layer_mb) == numbers["total_memory"]


@pytest.mark.parametrize("case", [0, 1])
def test_homogeneous_planner_reproduces_the_reference(golden, tmp_path, case):
    run = golden["homogeneous"]["runs"][case]
    folder, hostfile = tmp_path / "profiles", tmp_path / "hostfile"
    folder.mkdir()
    samples = sample_documents(golden)
    if case == 0:
        for (tp, batch), document in samples.items():
            (folder / profile_name(("A100", tp, batch))).write_text(json.dumps(document))
    else:
        write_profiles(folder, samples, 10, 128)
    hostfile.write_text("0.0.0.4 slots=4\n" * 2)
    write_clusterfile(tmp_path / "clusterfile.json")
    max_tp = run["inputs"]["max_profiled_tp_degree"]
    options = MetisOptions(num_layers=10, gbs=128, max_profiled_tp_degree=max_tp,
                           reference_profile="DeviceType.A100_tp1_bs1.json")
    result = run_homogeneous(hostfile, tmp_path / "clusterfile.json", folder, options)
    assert result.num_plans == run["plans_with_requested_gbs"]
    assert len(result.missing) == run["key_errors"]
    assert sum(plan.cost for plan in result.ranking) == pytest.approx(run["sum_of_costs"], rel=1e-12)
    top = [[plan.cost, plan.dp, plan.pp, plan.tp, plan.microbatch] for plan in result.ranking[:6]]
    assert top == [pytest.approx(row, rel=1e-12) for row in run["top"]]
