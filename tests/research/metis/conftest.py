"""Golden results of the reference, and the inputs it had: cluster file, host file, synthetic profiles."""

import json
from pathlib import Path

import pytest

from mstrain.planner.mixed.hosts import write_hostfile
from research.metis.synthetic import write_profiles

CLUSTER = {  # address: (type, inter GB/s, intra GB/s, memory GB)
    "0.0.0.1": ("V100", 10, 50, 16),
    "0.0.0.2": ("P100", 10, 50, 15),
    "0.0.0.3": ("T4", 10, 50, 15),
    "0.0.0.4": ("A100", 10, 46, 80),
}


def load_golden(config) -> dict:
    folder = config.getoption("--golden", default=None) or Path(__file__).parents[2] / "golden"
    return json.loads((Path(folder) / "metis.json").read_text())


@pytest.fixture(scope="session")
def golden(request) -> dict:
    return load_golden(request.config)


def sample_documents(golden: dict, repository: str = "livingshade") -> dict[tuple[int, int], dict]:
    """The nine sample profiles in the reference's file format, by (tp, batch)."""
    samples = golden["sample_profiles"]
    parameters = samples["parameters_per_layer_bytes_first_mid_last"]
    documents = {}
    for name, sample in samples["repos"][repository].items():
        _, tp, batch = name.split("_")
        first, middle, last = sample["layer_compute_first_mid_last"]
        memory = sample["memory_mb_first_mid_last"]
        times = {key: value for key, value in sample.items() if key.endswith("_ms")}
        documents[int(tp[2:]), int(batch[2:])] = {
            "model": {"model_name": samples["model_name"], "num_layers": 10, "parameters": {
                "parameters_per_layer_bytes": [parameters[0]] + [parameters[1]] * 8 + [parameters[2]]}},
            "execution_time": {**times, "layer_compute_total_ms": [first] + [middle] * 8 + [last]},
            "execution_memory": {"layer_memory_total_mb": [memory[0]] + [memory[1]] * 8 + [memory[2]]},
        }
    return documents


def write_clusterfile(path: Path, entries=CLUSTER) -> None:
    names = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")
    path.write_text(json.dumps({address: dict(zip(names, values)) for address, values in entries.items()}))


@pytest.fixture(scope="session")
def inputs(golden, tmp_path_factory):
    """inputs(num_layers, devices_per_type) -> (host file, cluster file, profile folder), written once."""
    root = tmp_path_factory.mktemp("metis")
    write_clusterfile(root / "clusterfile.json")

    def make(num_layers: int, devices_per_type: int):
        hostfile, profiles = root / f"hostfile{devices_per_type}", root / f"profile{num_layers}"
        write_hostfile(hostfile, devices_per_type)
        if not profiles.exists():
            write_profiles(profiles, sample_documents(golden), num_layers, 128)
        return hostfile, root / "clusterfile.json", profiles

    return make
