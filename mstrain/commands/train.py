"""Trains a transformer on a mesh, or compiles its step for an absent TPU slice (check=true)."""

import dataclasses
import json
from pathlib import Path

from mstrain.cli import Command, Results, compose, describe_keys
from mstrain.commands.folder import init_overrides
from mstrain.planner.plan_file import plan_overrides
from mstrain.training.config import RunConfig
from mstrain.training.unread import check_typed


def load_config(arguments: list[str]) -> RunConfig:
    """Composes conf/ with command-line overrides into a checked run; raises ValueError with the fix otherwise."""
    words = [*arguments, *plan_overrides(arguments), *_recorded(arguments), *init_overrides(arguments)]
    config = compose(RunConfig, "config", words)
    check_typed(config, arguments)
    return dataclasses.replace(config, optimizer=config.optimizer.for_width(config.model.width))


def _recorded(arguments: list[str]) -> list[str]:
    """Arguments from the record in run_dir, so that `run_dir=` alone resumes a run."""
    if not any(argument.startswith("run_dir=") for argument in arguments):
        return []
    from mstrain.training.record import recorded_overrides

    return recorded_overrides(arguments)


def main(arguments: list[str]) -> int:
    if arguments == ["model=list"]:
        from rich.console import Console

        from mstrain.models.zoo import zoo_table

        Console().print(zoo_table())
        return 0
    from mstrain.job.job import joined
    from mstrain.job.preemption import ending_on_signals
    from mstrain.job.process_info import find_process
    from mstrain.training import console
    from mstrain.training.prepare import prepare
    from mstrain.training.run_lock import exclusive
    from mstrain.training.session import train

    config = load_config(arguments)
    if config.check:
        from mstrain.benchmarks.check import check

        return check(config)
    console.protect()
    process, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(process, config.hosts, config.run_dir, devices) as job, ending_on_signals(job):
        with exclusive(config.run_dir, job) as check_lock:
            return train(prepare(config, job), check_lock)


def help_lines(_: list[str]) -> list[str]:
    return ["model=list prints the models with exact parameter counts.", "", *describe_keys(RunConfig, "config")]


def _columns(run_dir: Path) -> dict[str, str]:
    """Columns of a sweep's table from the summary.json of a finished run."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    columns = {"validation loss": ("validation_loss", ".4f"), "tokens/s": ("tokens_per_second", ",.0f")}
    return {name: format(summary[key], spec) for name, (key, spec) in columns.items() if summary.get(key) is not None}


def _picture(runs: dict[str, Path]) -> bytes | None:
    from mstrain.training.curves import validation_curves

    return validation_curves(runs)


RESULTS = Results(_columns, _picture)
COMMAND = Command("train", main, (__doc__ or "").strip(), load_config, help_lines, RESULTS)
