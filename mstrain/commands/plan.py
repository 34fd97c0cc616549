"""Plans parallel training for a cluster: searches, simulates, and prints the command that trains the best plan."""

import importlib.util

from mstrain.cli import Command


def main(arguments: list[str]) -> int:
    if importlib.util.find_spec("numba") is None:
        raise ValueError("Planning compiles its search with numba, which is not installed. Type pip install numba.")
    from mstrain.commands.plans import run
    from mstrain.mesh import skip_absent_tpu

    skip_absent_tpu()
    return run(arguments)


def config(arguments: list[str]):
    from mstrain.commands.plans.modes import load

    return load(arguments)[1]


def help_lines(arguments: list[str]) -> list[str]:
    from mstrain.commands.plans import help_lines

    return help_lines(arguments)


COMMAND = Command("plan", main, (__doc__ or "").strip(), config, help_lines)
