"""The commands: key=value arguments in, exit code out. Each imports what it needs when it runs."""

import importlib

from mstrain.cli import Command

COMMANDS = ("train", "benchmark", "plan", "evaluate", "sample", "supervise")


def command_named(name: str) -> Command:
    """The command of that name, one of COMMANDS."""
    return importlib.import_module(f"mstrain.commands.{name}").COMMAND
