"""The command line `mstrain COMMAND [key=value ...]`, also `python -m mstrain COMMAND [key=value ...]`."""

import difflib
import sys

from mstrain.start import start

start()

from mstrain import __version__
from mstrain.cli import run_command
from mstrain.commands import COMMANDS, command_named


def main() -> None:
    """Runs the command that the first word names; exits with 2 for an unknown command."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in COMMANDS:
        run_command(command_named(name), arguments)
    if name in ("-h", "--help", "help"):
        print("mstrain COMMAND [key=value ...]   (mstrain COMMAND --help lists the keys)\n")
        for known in COMMANDS:
            print(f"  {known:<10} {command_named(known).summary}")
        sys.exit(0)
    if name == "--version":
        print(f"mstrain {__version__}")
        sys.exit(0)
    near = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
    print(f"mstrain: Unknown command {name!r}. {hint}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
