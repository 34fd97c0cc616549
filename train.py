"""Trains a transformer on a mesh: python train.py [key=value ...]; --help lists the keys."""

from mstrain.config import run_command


def main(arguments: list[str]) -> int:
    if arguments == ["model=list"]:
        from rich.console import Console

        from mstrain.models.zoo import zoo_table

        Console().print(zoo_table())
        return 0
    from mstrain.config import load_config
    from mstrain.hosts import find_seat, joined
    from mstrain.training.run import prepare

    config = load_config(arguments)
    if config.check:
        from mstrain.benchmarks.check import check

        return check(config)
    seat, devices = find_seat(config.coordinator, config.processes, config.process)
    with joined(seat, config.hosts, devices) as job:
        return prepare(config, job).train()


if __name__ == "__main__":
    run_command("train", main)
