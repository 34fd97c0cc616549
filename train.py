"""Trains a transformer on a mesh: python train.py [key=value ...]; --help lists the keys."""

from mstrain.cli import run_command


def main(arguments: list[str]) -> int:
    if arguments == ["model=list"]:
        from rich.console import Console

        from mstrain.models.zoo import zoo_table

        Console().print(zoo_table())
        return 0
    from mstrain.job.job import find_process, joined
    from mstrain.training.config import load_config
    from mstrain.training.run import prepare

    config = load_config(arguments)
    if config.check:
        from mstrain.benchmarks.check import check

        return check(config)
    seat, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(seat, config.hosts, devices) as job:
        return prepare(config, job).train()


def help_lines(_: list[str]) -> list[str]:
    from mstrain.cli import describe_keys
    from mstrain.training.config import RunConfig

    return describe_keys(RunConfig)


if __name__ == "__main__":
    run_command("train", main, help_lines)
