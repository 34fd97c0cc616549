"""The commands. Each maps key=value arguments to an exit code and imports its modules when it runs."""

import importlib

from mstrain.cli import Command

COMMANDS = ("train", "benchmark", "plan", "evaluate", "sample", "export", "supervise")


def command_named(name: str) -> Command:
    """The command of that name, one of COMMANDS."""
    return importlib.import_module(f"mstrain.commands.{name}").COMMAND
