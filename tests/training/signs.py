"""Whether curves of Lion differ between meshes because a change of almost nothing changes its sign.

    python -m tests.training.signs [DRAWS]

Lion moves every weight by the sign of its change. For each draw the command makes twenty steps on one device from
nudged weights (`tests.training.flips`), and prints the largest relative difference of loss and gradient norm.
"""

import dataclasses
import sys

import numpy as np

from mstrain.mesh import emulate_devices
from mstrain.models.parallel import ParallelConfig
from tests.training.cases import OPTIMIZER, Case
from tests.training.flips import nudged
from tests.training.parity import STEPS, batches, compiled, initial


def main(draws: int) -> None:
    emulate_devices(1)
    run = compiled(Case("1x1", ParallelConfig("gspmd"), optimizer=dataclasses.replace(OPTIMIZER, name="lion")))
    expected = run(initial(), batches(), np.int32(STEPS))[0]
    print("| draw | loss | gradient norm |\n| --- | --- | --- |")
    for draw in range(draws):
        start = nudged(initial(), draw)
        loss, norm = np.max(np.abs(np.asarray(run(start, batches(), np.int32(STEPS))[0]) / expected - 1), axis=0)
        print(f"| {draw} | {loss:.1e} | {norm:.1e} |")


if __name__ == "__main__":
    main(int([*sys.argv[1:], "6"][0]))
