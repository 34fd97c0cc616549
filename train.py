"""An alias of `mstrain train`: python train.py [key=value ...]; --help lists the keys."""

import gc

gc.set_threshold(100_000)  # the objects of imports stay, and to look through them takes 0.2 s

from mstrain.cli import run_command
from mstrain.commands.train import COMMAND

if __name__ == "__main__":
    run_command(COMMAND)
