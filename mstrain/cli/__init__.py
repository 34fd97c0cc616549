"""From a command line to a checked dataclass, and from an error to a message. Knows no field of any config."""

from mstrain.cli.command import Command, run_command
from mstrain.cli.compose import compose, to_yaml
from mstrain.cli.fields import build, known_keys, own_config
from mstrain.cli.help import describe_keys

__all__ = ["Command", "build", "compose", "describe_keys", "known_keys", "own_config", "run_command", "to_yaml"]
