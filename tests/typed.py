"""Commands as they are typed."""

import sys

import pytest

from mstrain.cli import Command, run_command

SMALL = ["model=tiny", "data=synthetic", "data.num_tokens=4096", "seq=16", "batch=16", "steps=2"]


def exit_code(command: Command, *arguments: str) -> int:
    """Exit code of the command with these arguments, as `run_command` decides it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [f"{command.name}.py", *arguments])
        run_command(command)
    return ended.value.code
