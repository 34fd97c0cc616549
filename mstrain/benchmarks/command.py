"""The command benchmark.py: prints a table and writes files to run_dir."""

from pathlib import Path

from rich.console import Console

from mstrain.benchmarks.comparison import Comparison, run_comparison
from mstrain.benchmarks.config import BenchmarkConfig, load
from mstrain.benchmarks.pod import pod_table
from mstrain.benchmarks.presets import PRESETS, PUBLISHED
from mstrain.benchmarks.table import Row, to_table, write
from mstrain.hardware import parse_target

WIDTH = 110  # of a table in a file or pipe


def run(arguments: list[str]) -> int:
    """Runs the benchmark; the exit code is 1 when no row has a result. Raises ValueError for a mistake."""
    config = load(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    if config.tune == "compile":
        from mstrain.benchmarks.refined import refine_all

        return refine_all(config, console)
    if config.bench == "tune":
        from mstrain.benchmarks.tuned import explain_all

        return explain_all(config, console)
    if config.bench == "collectives":
        from mstrain.benchmarks.collectives import measure_links

        return measure_links(config, console)
    if config.bench == "data":
        from mstrain.benchmarks.data import measure_data

        return measure_data(config, console)
    if config.bench == "calibrate":
        from mstrain.benchmarks.calibrate import calibrate
        from mstrain.benchmarks.calibrate_check import check

        return (check if config.check else calibrate)(config, console)
    report = run_comparison(compare(config), Path(config.run_dir), console)
    if config.preset:
        report.rows.append(published(config))
    console.print(to_table(report))
    if report.kind == "measured" and report.peak is None and (config.bench, config.algorithms) == ("step", "all"):
        console.print(pod_table())
    console.print("Written:", *write(report, Path(config.run_dir)), soft_wrap=True)
    return 0 if any(row.seconds for row in report.rows) else 1


def compare(config: BenchmarkConfig) -> Comparison:
    """The comparison, predicted for a target or measured on the devices present."""
    if config.target:
        from mstrain.benchmarks.predicted import predict_all as compare_all
    elif config.bench == "peers":
        from mstrain.benchmarks.peers.compare import compare_peers as compare_all
    else:
        from mstrain.benchmarks.measured import measure as compare_all
    return compare_all(config)


def published(config: BenchmarkConfig) -> Row:
    """The published row of the preset's TPU slice, from transformer_shmap's README."""
    assert config.preset is not None
    model, flops, share = PUBLISHED[config.preset]
    devices = parse_target(PRESETS[config.preset]["target"]).devices
    return Row(
        model, f"{devices} cores", "published", config.bench, plan="README, 2023",
        flops_per_second=flops / devices, mfu=share,
    )  # fmt: skip
