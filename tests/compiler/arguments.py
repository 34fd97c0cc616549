"""Reads the arguments of the commands of this folder: keys of the command, and XLA options."""

from collections.abc import Sequence
from typing import Any

import yaml

from mstrain.cli import own_config


def read_arguments(kind: type, arguments: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """(the dataclass `kind`, XLA options) from arguments KEY=VALUE. Raises ValueError as `own_config` does."""
    own, others = own_config(kind, list(arguments))
    return own, {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in others)}
