"""Command lines to checked dataclasses, and errors to messages; independent of the fields of every config."""

from mstrain.cli.command import Command, run_command
from mstrain.cli.compose import added, check_keys, compose, to_yaml
from mstrain.cli.fields import build, known_keys, own_config
from mstrain.cli.help import describe_keys
from mstrain.cli.sweep import Results

__all__ = [
    "Command",
    "Results",
    "added",
    "build",
    "check_keys",
    "compose",
    "describe_keys",
    "known_keys",
    "own_config",
    "run_command",
    "to_yaml",
]
