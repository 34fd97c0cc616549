"""plan.py experiment=distir_mlp: the experiments of DistIR's notebook."""

from dataclasses import dataclass

from mstrain.commands.plans.output import make_folder
from mstrain.json_files import write_json
from research.distir.experiments import run_notebook
from research.distir.rules import rule_set


@dataclass(frozen=True)
class DistirConfig:
    """The experiments of DistIR's notebook on a multi-layer perceptron (64 layers of width 8192)."""

    rules: str = "corrected"
    """Rule set for the cost of operations: corrected, or a version of DistIR including its defects: notebook (February
    2021), march (April 2021) or head (January 2022). research/distir/rules.py lists the differences."""
    trials: int = 5
    """Number of timed simulations per program size, of which the median is reported."""
    run_dir: str = "runs/plan_distir_mlp"
    """Folder in which tables, plots and traces are written."""

    def __post_init__(self):
        rule_set(self.rules)
        if self.trials < 1:
            raise ValueError(f"trials={self.trials} is too small. Type trials=1 or more.")


def run_distir_mlp(config: DistirConfig) -> int:
    """Runs all experiments; prints throughputs, writes CSV, JSON, plots and a trace."""
    folder = make_folder(config.run_dir)
    summary = run_notebook(folder, config.rules, config.trials)
    write_json(summary, folder / "summary.json")
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
