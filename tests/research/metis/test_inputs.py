"""Bad input is a ValueError that names the file, the line or field, and the fix; what was found is kept."""

import json
import shutil

import pytest

from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import read_profiles
from research.metis.homogeneous import run_homogeneous
from research.metis.options import MetisOptions
from research.metis.result import SearchStopped
from research.metis.search import run_metis
from research.metis.synthetic import read_samples, write_profiles
from tests.research.metis.cases import CLUSTER, sample_documents, write_clusterfile

OPTIONS = MetisOptions(num_layers=10, gbs=128)


@pytest.fixture
def files(inputs, tmp_path):
    """Host file, cluster file and profiles of row 1, free to be spoilt."""
    hostfile, clusterfile, profiles = inputs(10, 16)
    shutil.copytree(profiles, tmp_path / "profile")
    return shutil.copy(hostfile, tmp_path), shutil.copy(clusterfile, tmp_path), tmp_path / "profile"


@pytest.mark.parametrize(
    "text, says",
    [
        ("0.0.0.1 slots=4\n0.0.0.9 slots=4\n", "hostfile:2: host 0.0.0.9 is not in"),
        ("0.0.0.1 slots=4\n0.0.0.1 slots=\n", "hostfile:2: cannot read"),
        ("0.0.0.1 slots=four\n", "hostfile:1: cannot read"),
        ("0.0.0.1\n", "write ADDRESS slots=K"),
        ("0.0.0.1 slots=0\n", "hostfile:1: 0.0.0.1 has no devices"),
        ("\n# nobody\n", "no hosts; write"),
    ],
)
def test_host_file(tmp_path, text, says):
    (tmp_path / "hostfile").write_text(text)
    write_clusterfile(tmp_path / "clusterfile.json")
    with pytest.raises(ValueError, match=says):
        read_hosts(tmp_path / "hostfile", tmp_path / "clusterfile.json")


def test_host_file_takes_both_spellings_blank_lines_and_any_count(tmp_path):
    (tmp_path / "hostfile").write_text("0.0.0.1 slots=16\n\n0.0.0.4 8  # the fast one\n")
    write_clusterfile(tmp_path / "clusterfile.json")
    cluster = read_hosts(tmp_path / "hostfile", tmp_path / "clusterfile.json")
    assert [(node.device_type, node.slots) for node in cluster.nodes] == [("V100", 16), ("A100", 8)]
    assert not cluster.repeated


@pytest.mark.parametrize(
    "entry, says",
    [
        (("V100", 10, 50, 0), "entry 0.0.0.1: memory is 0; write a positive number of GB per device"),
        (("V100", -1, 50, 16), "inter_bandwidth is -1; write a positive number of GB/s"),
        (("V100", 10, "50", 16), "intra_bandwidth is '50'"),
        (("V100", 10, 5e10, 16), "looks like bytes/s; write GB/s"),
        ((7, 10, 50, 16), "instance_type is 7; write a text"),
        (("V100", 10, 50), "entry 0.0.0.1: memory is missing"),
    ],
)
def test_cluster_file_entry(tmp_path, entry, says):
    (tmp_path / "hostfile").write_text("0.0.0.1 slots=4\n")
    write_clusterfile(tmp_path / "clusterfile.json", {**CLUSTER, "0.0.0.1": entry})
    with pytest.raises(ValueError, match=says):
        read_hosts(tmp_path / "hostfile", tmp_path / "clusterfile.json")


def test_missing_and_malformed_files_are_named(files):
    hostfile, clusterfile, profiles = files
    with pytest.raises(ValueError, match="host file nowhere: No such file"):
        run_metis("nowhere", clusterfile, profiles, OPTIONS)
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        run_metis(hostfile, clusterfile, "nowhere", OPTIONS)
    with open(clusterfile, "w") as file:
        file.write('{"0.0.0.1":\n oops')
    with pytest.raises(ValueError, match="clusterfile.json: line 2: not JSON"):
        run_metis(hostfile, clusterfile, profiles, OPTIONS)


def test_type_without_profiles_is_named(files):
    hostfile, clusterfile, profiles = files
    with open(hostfile, "a") as file:
        file.write("0.0.0.3 slots=4\n")
    with pytest.raises(ValueError, match="no profile of type T4; add .* types: A100, V100"):
        run_metis(hostfile, clusterfile, profiles, OPTIONS)


def spoil(profiles, change):
    path = profiles / "DeviceType.A100_tp1_bs1.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda d: d["execution_time"].pop("optimizer_time_ms"), "execution_time.optimizer_time_ms is missing"),
        (lambda d: d.pop("model"), "model is missing"),
        (lambda d: d["execution_time"].update(layer_compute_total_ms=[]), "is a list; write a list of numbers"),
        (lambda d: d["execution_time"].update(layer_compute_total_ms=[0.0] * 10), "has a time <= 0"),
        (lambda d: d["execution_time"].update(layer_compute_total_ms=[1.0] * 9), "has 9 layers, the model"),
        (lambda d: d["execution_time"].update(optimizer_time_ms="fast"), "is 'fast'; write a number of 0 or more"),
    ],
)
def test_profile_fields(files, change, says):
    spoil(files[2], change)
    with pytest.raises(ValueError, match=f"DeviceType.A100_tp1_bs1.json.*{says}"):
        run_metis(*files, OPTIONS)


def test_profile_names(files):
    (files[2] / "A100.json").write_text("{}")
    with pytest.raises(ValueError, match="A100.json: not a profile name"):
        read_profiles(files[2])


def test_missing_profile_keeps_the_plans_found(files):
    (files[2] / "DeviceType.V100_tp1_bs8.json").unlink()
    with pytest.raises(SearchStopped, match="V100_tp1_bs8.json is missing: add it, or lower") as stopped:
        run_metis(*files, OPTIONS)
    partial = stopped.value.partial
    assert 0 < partial.inter_stage_plans < 176
    assert 0 < partial.plans_costed == sum(partial.costed_by_attempt) and partial.best.cost > 0


def test_batch_that_profiles_cannot_serve_names_profile_and_fix(files):
    with pytest.raises(SearchStopped, match="_bs3.json is missing: gbs=96 in 2 microbatches is not"):
        run_metis(*files, MetisOptions(num_layers=10, gbs=96))


def test_cluster_on_which_nothing_fits(files, tmp_path):
    tiny = {address: (name, inter, intra, 0.5) for address, (name, inter, intra, _) in CLUSTER.items()}
    write_clusterfile(tmp_path / "clusterfile.json", tiny)
    with pytest.raises(SearchStopped, match="no plan fits this cluster.*add devices or memory") as stopped:
        run_metis(files[0], tmp_path / "clusterfile.json", files[2], OPTIONS)
    assert stopped.value.partial.inter_stage_plans == 176 and stopped.value.partial.ranking == ()


@pytest.mark.parametrize(
    "lines, says",
    [
        ("0.0.0.1 slots=16\n", "reads one digit, here 1; write several hosts"),
        ("0.0.0.1 slots=2\n0.0.0.4 slots=4\n", "put the host with the most slots first"),
    ],
)
def test_slots_the_reference_misreads_are_refused(files, lines, says):
    with open(files[0], "w") as file:
        file.write(lines)
    with pytest.raises(ValueError, match=says):
        run_metis(*files, OPTIONS)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"gbs": 0}, "gbs=0 is too small"),
        ({"num_layers": 1}, "num_layers=1 is too small"),
        ({"max_seconds": 0.0}, "max_seconds=0.0 leaves no time"),
        ({"device_order": ("A100",)}, "name each type of the host file once"),
        ({"reference_profile": "DeviceType.A100_tp3_bs1.json"}, "no such profile; choose one of the folder"),
    ],
)
def test_options(files, change, says):
    with pytest.raises(ValueError, match=says):
        run_metis(*files, MetisOptions(**{"num_layers": 10, "gbs": 128, **change}))


def test_homogeneous_planner_refuses_a_mixed_cluster(files):
    with pytest.raises(ValueError, match="types A100, V100; keep hosts of one type"):
        run_homogeneous(*files, OPTIONS)


def test_homogeneous_planner_costs_more_stages_than_layers(files):
    """Sixteen devices and ten layers: some stages of the deepest plans have none, and take no time."""
    hostfile, *others = files
    with open(hostfile, "w") as file:
        file.write("0.0.0.4 slots=4\n" * 4)
    result = run_homogeneous(hostfile, *others, OPTIONS)
    deepest = next(plan for plan in result.ranking if (plan.pp, plan.microbatch) == (16, OPTIONS.gbs))
    whole = read_profiles(others[1])["A100", 1, OPTIONS.gbs].forward_backward_ms  # one microbatch through all layers
    assert whole < deepest.cost < 1.1 * whole


def test_generator_arguments(tmp_path):
    samples = sample_documents()
    with pytest.raises(ValueError, match="max_batch=96: give a power of two"):
        write_profiles(tmp_path, samples, 10, 96)
    with pytest.raises(ValueError, match="num_layers=2: "):
        write_profiles(tmp_path, samples, 2, 128)
    with pytest.raises(ValueError, match="DeviceType.A100_tp1_bs1.json: no such sample"):
        read_samples(tmp_path)
