"""The experiments of plan.py: the DistIR notebook's, and synthetic inputs for the Metis planners."""

import json
from dataclasses import dataclass

from mstrain.planning.commands.output import make_folder
from mstrain.planning.experiments import run_notebook
from mstrain.planning.metis.cluster import write_hostfile
from mstrain.planning.metis.synthetic import read_samples, write_profiles
from mstrain.planning.rules import rule_set

# Type and address of the hosts that `write_hostfile` writes; inter and intra GB/s and GB per device.
SYNTHETIC_HOSTS = {"0.0.0.1": ("V100", 10, 50, 16), "0.0.0.4": ("A100", 10, 46, 80)}


@dataclass(frozen=True)
class DistirConfig:
    """The experiments of DistIR's notebook on a perceptron of 64 layers of width 8192.

    Attributes:
      rules: what operations cost: corrected, notebook, march or head (mstrain/planning/rules.py).
      trials: simulations timed per program size.
      run_dir: where tables, plots and traces go.
    """

    rules: str = "corrected"
    trials: int = 5
    run_dir: str = "runs/plan_distir_mlp"

    def __post_init__(self):
        rule_set(self.rules)
        if self.trials < 1:
            raise ValueError(f"trials={self.trials} is too small. Type trials=1 or more.")


def run_distir_mlp(config: DistirConfig) -> int:
    """Runs them all; prints throughputs, writes CSV, JSON, plots and a trace."""
    folder = make_folder(config.run_dir)
    summary = run_notebook(folder, config.rules, config.trials)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"sequential {summary['sequential']:10.1f} samples/s   rules {summary['rules']}")
    for title in ("best", "best_pipeline"):
        row = summary[title]
        plan = f"data {row['dp_degree']} tensor {row['hp_degree']} pipeline {row['pp_degree']}"
        print(
            f"{title:13s} {row['throughput']:7.1f} samples/s   {plan} microbatches {row['num_microbatches']}"
            f"   simulated, {row['peak_memory'] / 1e9:.1f} GB per device"
        )
    print(f"{summary['plans']} plans simulated, {summary['rejected']} rejected")
    print(f"tables, plots and best_pipeline.json.gz (ui.perfetto.dev) in {folder}")
    return 0


@dataclass(frozen=True)
class InputsConfig:
    """Synthetic inputs of the Metis planners: equal numbers of A100 and V100, hosts of four.

    Attributes:
      samples: folder of the nine DeviceType.A100_tp{1,2,4}_bs{1,2,4}.json profiles to grow from.
      num_layers: layers of the model, embedding and output included.
      devices_per_type: devices of each type.
      max_batch: largest profiled batch and tensor degree, a power of two.
      slowdown: how much slower the V100 is.
      run_dir: gets hostfile, clusterfile.json and profiles/.
    """

    samples: str
    num_layers: int = 10
    devices_per_type: int = 16
    max_batch: int = 128
    slowdown: float = 3.5
    run_dir: str = "runs/plan_metis_inputs"

    def __post_init__(self):
        if not self.slowdown > 0:
            raise ValueError(f"slowdown={self.slowdown} must be above 0. Type slowdown=3.5.")


def run_metis_inputs(config: InputsConfig) -> int:
    """Writes host file, cluster file and profiles; prints the command that plans with them."""
    folder = make_folder(config.run_dir)
    samples = read_samples(config.samples)
    write_hostfile(folder / "hostfile", config.devices_per_type)
    names = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")
    entries = {address: dict(zip(names, values)) for address, values in SYNTHETIC_HOSTS.items()}
    (folder / "clusterfile.json").write_text(json.dumps(entries, indent=1) + "\n")
    files = write_profiles(
        folder / "profiles", samples, config.num_layers, config.max_batch, slowdown=config.slowdown
    )
    print(f"{files} synthetic profiles, host file and cluster file in {folder}; now type")
    print(
        f"python plan.py planner=metis hostfile={folder / 'hostfile'} "
        f"clusterfile={folder / 'clusterfile.json'} "
        f"profiles={folder / 'profiles'} num_layers={config.num_layers} gbs=128"
    )
    return 0
