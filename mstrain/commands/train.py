"""train: trains a transformer on a mesh, or compiles its step for an absent slice (check=true)."""

import dataclasses

from rich.console import Console

from mstrain.cli import compose, describe_keys
from mstrain.models.zoo import zoo_table
from mstrain.plan_file import plan_overrides
from mstrain.training.config import RunConfig


def load_config(arguments: list[str]) -> RunConfig:
    """Composes conf/ with command-line overrides into a checked run; raises ValueError with the fix otherwise."""
    config = compose(RunConfig, "config", [*arguments, *plan_overrides(arguments)])
    return dataclasses.replace(config, optimizer=config.optimizer.for_width(config.model.width))


def main(arguments: list[str]) -> int:
    """Runs `train` with key=value arguments; returns the exit code."""
    if arguments == ["model=list"]:
        Console().print(zoo_table())
        return 0
    from mstrain.benchmarks.check import check
    from mstrain.job.job import find_process, joined
    from mstrain.training.prepare import prepare
    from mstrain.training.session import train

    config = load_config(arguments)
    if config.check:
        return check(config)
    seat, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(seat, config.hosts, devices) as job:
        return train(prepare(config, job))


def help_lines(_: list[str]) -> list[str]:
    return describe_keys(RunConfig)
