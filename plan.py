"""An alias of `mstrain plan`: python plan.py [key=value ...]; --help lists the keys."""

from mstrain.start import start

start()

from mstrain.cli import run_command
from mstrain.commands.plan import COMMAND

if __name__ == "__main__":
    run_command(COMMAND)
