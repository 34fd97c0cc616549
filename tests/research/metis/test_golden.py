"""Counts, costs and best plans of the reference, plan for plan: one test per case of metis.json."""

import json

import pytest

from mstrain.hardware.layer_profiles import read_profiles
from research.metis.synthetic import write_profiles
from tests.golden_option import differences, golden, parametrize
from tests.research.metis.cases import homogeneous_figures, repository_of, sample_documents, search_figures

TOLERANCE = 1e-9  # relative; sums of up to a million costs


def pytest_generate_tests(metafunc):
    document = golden(metafunc.config, "metis.json")
    searches = [
        (config.get("id", f"config{number}"), config["inputs"], run)
        for number, config in enumerate(document.get("configs", ()))
        for run in config["runs"]
    ]
    parametrize(metafunc, "search", searches, lambda number, case: "-".join(
        (case[0], str(case[2].get("mode")), *case[2].get("first_node_sequence", ()))))  # fmt: skip
    checks = list(document.get("synthetic_profile_checks", {}).items())
    parametrize(metafunc, "check", checks, lambda number, case: case[0])
    runs = document.get("homogeneous", {}).get("runs", [])
    parametrize(metafunc, "homogeneous", runs, lambda number, case: case.get("id", number))


def test_search_reproduces_the_reference(case_files, search):
    _, given, run = search
    files = case_files.write(given)
    assert not differences(search_figures(files, given, run, run["profile_reference_file"]), run, TOLERANCE)
    for file_name, other in run.get("best_with_other_reference_file", {}).items():
        assert not differences(search_figures(files, given, run, file_name), other, TOLERANCE), file_name


def test_synthetic_profiles_have_the_golden_numbers(request, tmp_path, check):
    name, expected = check
    document = golden(request.config, "metis.json")
    layers, most = expected.get("args", (int(name.split()[0]), 128))
    samples = sample_documents(document, repository_of(expected, document))
    found = {"n_files": write_profiles(tmp_path, samples, layers, most)}
    times = [json.loads(path.read_text())["execution_time"] for path in tmp_path.iterdir()]
    for key in ("total_time_ms", "forward_backward_time_ms"):
        found[f"sum_{key}"] = sum(each[key] for each in times)
    assert not differences(found, expected, TOLERANCE)
    profiles = read_profiles(tmp_path)
    for file_name, numbers in expected.get("files", {}).items():
        device_type, tp, batch = file_name.split("_")
        key = device_type, int(tp[2:]), int(batch[2:])
        assert not differences(profile_figures(tmp_path, key, profiles[key]), numbers, TOLERANCE), file_name


def profile_figures(folder, key, profile) -> dict:
    """One profile, as written and as read, under the names of the golden file."""
    document = json.loads((folder / "DeviceType.{}_tp{}_bs{}.json".format(*key)).read_text())

    def ends(values) -> list:
        return [values[0], values[1], values[-1]]

    return {
        **{name: value for name, value in document["execution_time"].items() if isinstance(value, float)},
        "layer_compute_first_mid_last": ends(profile.layer_ms),
        "n_layers": len(profile.layer_ms),
        "memory_first_mid_last": ends(profile.layer_mb),
        "fb_sync_as_loaded": profile.sync_ms,
        "num_MHA_layers": document["model"]["num_MHA_layers"],
        "total_parameters_bytes": sum(profile.parameter_bytes),
        "total_memory": sum(profile.layer_mb),
    }


def test_homogeneous_planner_reproduces_the_reference(case_files, homogeneous):
    given = homogeneous["inputs"]
    found = homogeneous_figures(case_files.write(given), given, homogeneous)
    assert not differences(found, homogeneous, TOLERANCE)


@pytest.mark.parametrize("given,message", [
    ({"hostfile": "gen_hostfile 16", "profile": "measured at home"}, "gen_synth_data LAYERS BATCH"),
    ({"hostfile": 16, "profile": "gen_synth_data 4 4"}, "ADDRESS slots=K"),
    ({"hostfile": "gen_hostfile 16", "profile": "gen_synth_data 4 4", "clusterfile": "mine"}, "the object itself"),
    ({"hostfile": "gen_hostfile 16", "profile": "gen_synth_data 4 4", "profile_samples": "mine"}, "names none of"),
])  # fmt: skip
def test_a_case_with_unreadable_inputs_fails_with_a_message(case_files, given, message):
    with pytest.raises(ValueError, match=message):
        case_files.write(given)
