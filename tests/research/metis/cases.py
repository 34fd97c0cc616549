"""Golden runs of metis.json: the input files of the Metis planners, and results under the names of the file."""

import json
import re
import shutil
from pathlib import Path

from mstrain.hardware.layer_profiles import profile_name
from research.metis.homogeneous import run_homogeneous
from research.metis.options import MetisOptions
from research.metis.result import SearchStopped
from research.metis.search import run_metis
from research.metis.synthetic import write_hostfile, write_profiles
from tests.golden_option import FOLDER

FIELDS = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")
CLUSTER = {  # address: (type, inter GB/s, intra GB/s, memory GB)
    "0.0.0.1": ("V100", 10, 50, 16),
    "0.0.0.2": ("P100", 10, 50, 15),
    "0.0.0.3": ("T4", 10, 50, 15),
    "0.0.0.4": ("A100", 10, 46, 80),
}
OPTIONS = ("num_layers", "gbs", "hidden_size", "sequence_length", "vocab_size", "max_profiled_tp_degree",
           "max_profiled_batch_size", "min_group_scale_variance", "max_permute_len")  # fmt: skip


def sample_documents(golden: dict | None = None, repository: str = "livingshade") -> dict[tuple[int, int], dict]:
    """The nine sample profiles in the reference's file format, by (tp, batch); of tests/golden unless given."""
    golden = golden if golden and "sample_profiles" in golden else json.loads((FOLDER / "metis.json").read_text())
    samples = golden["sample_profiles"]
    parameters = samples["parameters_per_layer_bytes_first_mid_last"]
    layers = samples["num_layers"]

    def per_layer(values) -> list:
        return [values[0]] + [values[1]] * (layers - 2) + [values[2]]

    documents = {}
    for name, sample in samples["repos"][repository].items():
        _, tp, batch = name.split("_")
        times = {key: value for key, value in sample.items() if key.endswith("_ms")}
        compute = per_layer(sample["layer_compute_first_mid_last"])
        documents[int(tp[2:]), int(batch[2:])] = {
            "model": {"model_name": samples["model_name"], "num_layers": layers,
                      "parameters": {"parameters_per_layer_bytes": per_layer(parameters)}},
            "execution_time": {**times, "layer_compute_total_ms": compute},
            "execution_memory": {"layer_memory_total_mb": per_layer(sample["memory_mb_first_mid_last"])},
        }  # fmt: skip
    return documents


def repository_of(given: dict, golden: dict) -> str:
    """The repository whose samples a case names in `profile_samples` or in `profile`."""
    known = golden.get("sample_profiles", {}).get("repos") or ("livingshade", "SamsungLabs")
    for key in ("profile_samples", "profile"):
        for name in known:
            if name in str(given.get(key, "")):
                return name
    if "profile_samples" in given:
        raise ValueError(f"profile_samples {given['profile_samples']!r} names none of {', '.join(known)}")
    return next(iter(known))


def write_case_profiles(folder: Path, given: dict, golden: dict) -> None:
    """The profiles of "gen_synth_data L M", of "gen_synth_data L M, T files only" or of "the 9 X sample files"."""
    text, samples = str(given.get("profile")), sample_documents(golden, repository_of(given, golden))
    generated = re.search(r"gen_synth_data(?:\.py)?\s+(\d+)\s+(\d+)", text)
    only = re.search(r"(\w+)\s+files only", text)
    if generated:
        write_profiles(folder, samples, int(generated[1]), int(generated[2]))
    elif "sample" in text:
        folder.mkdir(parents=True)
        for (tp, batch), document in samples.items():
            (folder / profile_name(("A100", tp, batch))).write_text(json.dumps(document))
    else:
        raise ValueError(f'profile {text!r} is neither "gen_synth_data LAYERS BATCH" nor "the 9 NAME sample files"')
    for path in folder.glob("DeviceType.*.json") if only else ():
        if not path.name.startswith(f"DeviceType.{only[1]}_"):
            path.unlink()


def write_case_hosts(path: Path, hosts) -> None:
    """A host file of "gen_hostfile N", of "2 lines "ADDRESS slots=K"", of raw lines or of a list of lines."""
    if isinstance(hosts, str):
        generated, counted = (
            re.search(r"gen_hostfile(?:\.py)?\s+(\d+)", hosts),
            re.findall(r'(\d+) lines? "(.+?)"', hosts),
        )
        if generated:
            return write_hostfile(path, int(generated[1]))
        hosts = [line for count, line in counted for _ in range(int(count))] or re.split(r"[\n,;]+", hosts)
    if not isinstance(hosts, list):
        raise ValueError(f'hostfile {hosts!r} is neither "gen_hostfile N" nor lines "ADDRESS slots=K"')
    lines = []
    for host in hosts:
        if isinstance(host, dict):
            host = [host.get("address", host.get("ip")), host.get("slots")]
        lines.append(host if isinstance(host, str) else f"{host[0]} slots={host[1]}")
    path.write_text("\n".join(lines) + "\n")


def write_clusterfile(path: Path, entries=CLUSTER) -> None:
    """Entries by address, each a list in the order of FIELDS or an object."""
    path.write_text(json.dumps({
        address: entry if isinstance(entry, dict) else dict(zip(FIELDS, entry)) for address, entry in entries.items()
    }))  # fmt: skip


def cluster_entries(cluster, golden: dict, folder: Path) -> dict:
    """Entries of a cluster file that is given as an object, as inline JSON, as a file of the folder or by name."""
    if cluster is None:
        return CLUSTER
    if isinstance(cluster, dict):
        return cluster
    if isinstance(cluster, str) and cluster.lstrip().startswith("{"):
        return json.loads(cluster)
    named = golden.get("clusterfiles", {})
    if cluster in named:
        return named[cluster]
    if isinstance(cluster, str) and (folder / cluster).is_file():
        return json.loads((folder / cluster).read_text())
    if isinstance(cluster, str) and "clusterfile.json" in cluster and "SamsungLabs" not in cluster:
        return CLUSTER
    raise ValueError(f"clusterfile {cluster!r}: give the object itself, or livingshade/Metis clusterfile.json")


class CaseFiles:
    """Writes the files of cases below `root`, equal ones once; `golden` is the document, `folder` where it lies."""

    def __init__(self, root: Path, golden: dict, folder: Path):
        self.root, self.golden, self.folder = root, golden, folder
        self.written: dict[str, Path] = {}

    def write(self, given: dict) -> tuple[Path, Path, Path]:
        """(host file, cluster file, profile folder). Raises ValueError for inputs that it cannot read."""
        return (
            self.once("hostfile", given.get("hostfile"), lambda path: write_case_hosts(path, given.get("hostfile"))),
            self.once("clusterfile.json", given.get("clusterfile"), lambda path: write_clusterfile(
                path, cluster_entries(given.get("clusterfile"), self.golden, self.folder))),
            self.once("profiles", [given.get("profile"), repository_of(given, self.golden)],
                      lambda path: write_case_profiles(path, given, self.golden)),
        )  # fmt: skip

    def once(self, kind: str, key, write) -> Path:
        text = json.dumps([kind, key])
        if text not in self.written:
            path = self.root / str(len(self.written)) / kind
            shutil.rmtree(path.parent, ignore_errors=True)  # left by inputs that could not be read
            path.parent.mkdir()
            write(path)
            self.written[text] = path
        return self.written[text]


def options_of(given: dict, **others) -> MetisOptions:
    return MetisOptions(**{name: given[name] for name in OPTIONS if name in given}, **others)


def plan_figures(plan) -> dict | None:
    """A plan under the names of the golden file."""
    return plan and {
        "cost": plan.cost,
        "node_sequence": list(plan.node_sequence),
        "device_groups": list(plan.device_groups),
        "strategies_dp_tp": [list(strategy) for strategy in plan.strategies],
        "batches": plan.batches,
        "layer_partition": list(plan.layer_partition),
        "num_stages_costed": plan.num_stage,
        "partition_attempt": plan.partition_attempt,
    }


def search_figures(files, given: dict, run: dict, reference_profile: str) -> dict:
    """A search under the names of the golden file, also if it was stopped."""
    walk = {"use_strat": run.get("use_strat", run.get("mode") == "strat")}
    order = tuple(run.get("first_node_sequence", ()))
    options = options_of(given, device_order=order, reference_profile=reference_profile, **walk)
    try:
        result = run_metis(*files, options)
    except SearchStopped as stopped:
        result = stopped.partial
    attempts = enumerate(result.costed_by_attempt, start=1)
    return {
        "count": result.count,
        "plans_costed": result.plans_costed,
        "sum_of_costs": result.sum_of_costs,
        "costed_by_partition_attempt": {str(number): count for number, count in attempts},
        "costed_with_num_stage_mismatch": result.with_num_stage_mismatch,
        "costed_with_missing_layers": result.with_missing_layers,
        "costed_with_empty_stage": result.with_empty_stage,
        "num_complete": result.num_complete,
        "best": plan_figures(result.ranking[0] if result.ranking else None),
        "best_complete": plan_figures(result.best_complete),
    }


def homogeneous_figures(files, given: dict, run: dict) -> dict:
    """The plans of one device type under the names of the golden file."""
    names = sorted(path.name for path in files[2].glob("DeviceType.*_tp1_bs1.json"))
    reference = run.get("profile_reference_file", given.get("profile_reference_file", names[0] if names else ""))
    result = run_homogeneous(*files, options_of(given, reference_profile=reference))
    ranking = [[plan.cost, plan.dp, plan.pp, plan.tp, plan.microbatch] for plan in result.ranking]
    return {
        "plans_with_requested_gbs": result.num_plans,
        "plans_costed": len(result.ranking),
        "key_errors": len(result.missing),
        "sum_of_costs": sum(row[0] for row in ranking),
        "top": ranking[: len(run.get("top", ()))],
    }
