"""Prints MFU tables: measured on the devices present, or predicted from the TPU compiler's schedule."""

from mstrain.cli import Command, describe_keys


def main(arguments: list[str]) -> int:
    from mstrain.benchmarks.command import run

    return run(arguments)


def config(arguments: list[str]):
    from mstrain.benchmarks.config import load

    return load(arguments)


def help_lines(_: list[str]) -> list[str]:
    from mstrain.benchmarks.config import BenchmarkConfig

    return describe_keys(BenchmarkConfig, "benchmark")


COMMAND = Command("benchmark", main, (__doc__ or "").strip(), config, help_lines)
