"""An alias of `mstrain train`: python train.py [key=value ...]; --help lists the keys."""

from mstrain.start import start

start()

from mstrain.cli import run_command
from mstrain.commands.train import COMMAND

if __name__ == "__main__":
    run_command(COMMAND)
