"""plan.py planner=metis, planner=homogeneous and experiment=metis_inputs: the planners of Metis and their inputs."""

import dataclasses
import shlex
from dataclasses import dataclass

from mstrain.commands.plans.mixed import Files
from mstrain.commands.plans.output import make_folder, progress
from mstrain.hardware.hosts import CLUSTER_FIELDS
from mstrain.json_files import write_json
from mstrain.planner.clock import Clock
from research.metis.homogeneous import run_homogeneous as search_homogeneous
from research.metis.options import MetisOptions
from research.metis.result import SearchStopped, reference_lines
from research.metis.search import run_metis as search_metis
from research.metis.synthetic import SAMPLES, read_samples, write_hostfile, write_profiles

# The hosts that `write_hostfile` writes: ADDRESS -> device type, GB/s between hosts, GB/s within one, GB per device.
SYNTHETIC_HOSTS = {"0.0.0.1": ("V100", 10, 50, 16), "0.0.0.4": ("A100", 10, 46, 80)}


@dataclass(frozen=True, kw_only=True)
class MetisConfig(MetisOptions, Files):
    """The search of Metis for a mixed cluster."""


def run_metis(config: MetisConfig) -> int:
    """Prints the lines that the reference prints and writes metis.json, also if a missing profile stops the search."""
    folder = make_folder(config.run_dir)
    try:
        with progress("planner=metis", Clock(config.max_seconds * config.trials)):
            result = search_metis(*config.paths, config)
    except SearchStopped as stopped:
        write_json(dataclasses.asdict(stopped.partial), folder / "metis.json")
        raise ValueError(f"{stopped} (the plans found until then are in {folder / 'metis.json'})") from None
    write_json(dataclasses.asdict(result), folder / "metis.json")
    print(*reference_lines(result), sep="\n")
    if result.exhausted:
        print(
            f"Search stopped after {result.seconds:.0f} s: {result.inter_stage_plans:,} inter-stage plans evaluated, "
            "not exhaustive. Type a larger max_seconds or max_plans."
        )
    if result.best != result.best_complete:
        print(
            "The cost of the best plan leaves out layers or stages, as do those of "
            f"{result.plans_costed - result.num_complete} of {result.plans_costed} plans. planner=optimal costs "
            "complete plans only."
        )
    print(f"ranking and statistics in {folder / 'metis.json'}")
    return 0


def run_homogeneous(config: MetisConfig) -> int:
    """Runs the planner of Metis for clusters of one device type; writes homogeneous.json."""
    folder = make_folder(config.run_dir)
    result = search_homogeneous(*config.paths, config)
    path = folder / "homogeneous.json"
    write_json(dataclasses.asdict(result), path)
    print(f"{result.num_plans} plans: {len(result.ranking)} costed, {len(result.missing)} without a profile")
    for plan in result.ranking[: config.top_k]:
        print(f"{plan.cost:12.3f} ms  dp {plan.dp} pp {plan.pp} tp {plan.tp} microbatch {plan.microbatch}")
    print(f"all plans in {path}")
    return 0


@dataclass(frozen=True)
class InputsConfig:
    """Synthetic inputs of the Metis planners: a cluster with equal numbers of A100 and V100 in hosts of four."""

    samples: str | None = None
    """Folder with the nine profiles DeviceType.A100_tp{1,2,4}_bs{1,2,4}.json, from which the others are extrapolated;
    null for those in research/metis/samples."""
    num_layers: int = 10
    """Number of layers, including the embedding and the output layer."""
    devices_per_type: int = 16
    """Number of devices of each type, A100 and V100; at least 4."""
    max_batch: int = 128
    """Largest batch and tensor-parallel degree of the profiles, a power of two of at least 4."""
    slowdown: float = 3.5
    """Factor by which all times of the V100 are longer than those of the A100."""
    run_dir: str = "runs/plan_metis_inputs"
    """Folder in which hostfile, clusterfile.json and profiles/ are written."""

    def __post_init__(self):
        if not self.slowdown > 0:
            raise ValueError(f"slowdown={self.slowdown} must be above 0. Type slowdown=3.5.")


def run_metis_inputs(config: InputsConfig) -> int:
    """Writes host file, cluster file and profiles; prints the command that plans with them."""
    folder = make_folder(config.run_dir)
    samples = read_samples(config.samples or SAMPLES)
    write_hostfile(folder / "hostfile", config.devices_per_type)
    entries = {address: dict(zip(CLUSTER_FIELDS, values)) for address, values in SYNTHETIC_HOSTS.items()}
    write_json(entries, folder / "clusterfile.json")
    files = write_profiles(folder / "profiles", samples, config.num_layers, config.max_batch, slowdown=config.slowdown)
    print(f"{files} synthetic profiles, host file and cluster file in {folder}. To plan with them, type")
    names = {"hostfile": "hostfile", "clusterfile": "clusterfile.json", "profiles": "profiles"}
    paths = " ".join(f"{key}={shlex.quote(str(folder / name))}" for key, name in names.items())
    print(f"python plan.py planner=metis {paths} num_layers={config.num_layers} gbs=128")
    return 0
