"""MFU tables, measured or predicted: python benchmark.py [key=value ...]; --help lists the keys."""

from mstrain.cli import run_command


def main(arguments: list[str]) -> int:
    from mstrain.benchmarks.command import run

    return run(arguments)


def help_lines(_: list[str]) -> list[str]:
    from mstrain.benchmarks.config import BenchmarkConfig
    from mstrain.cli import describe_keys

    return describe_keys(BenchmarkConfig)


if __name__ == "__main__":
    run_command("benchmark", main, help_lines)
