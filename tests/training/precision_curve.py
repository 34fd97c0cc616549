"""What products in 8 bits do to a curve: no 8-bit operands, int8, float8, and int8 in the gathers alone.

`python -m tests.training.precision_curve FOLDER [STEPS] [key=value ...]` trains `model=small` on the standard library
of Python with each (keys choose another model) and prints the mean training loss of the last tenth of the steps. It
writes precision.csv: mean loss of every twentieth of the steps. Gathers need several devices, so `travel=` has a mesh;
all others have one device, because their results do not depend on the mesh.
"""

import csv
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

import mstrain

PARTS = 20
VARIANTS = {
    "dtype": ["mesh=1x1"],
    "dtype, another mesh": ["mesh=2x2"],  # how far curves part that differ in the last bits only
    "precision=int8": ["mesh=1x1", "precision=int8"],
    "precision=fp8": ["mesh=1x1", "precision=fp8"],
    "travel=int8": ["mesh=2x2", "travel=int8"],
}


def curve(steps: int, keys: list[str]) -> np.ndarray:
    """Mean training loss of every twentieth of the steps."""
    state, step, feed = mstrain.trainer("parallel=meshslice", f"steps={steps}", *keys)
    losses = []
    for k in range(steps):
        state, metrics = step(state, feed(k))
        losses.append(metrics["loss"])
    return np.array(losses, np.float64).reshape(PARTS, -1).mean(axis=1)


def main(folder: Path, steps: int, keys: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found, at = {}, [steps * (part + 1) // PARTS for part in range(PARTS)]
    print("| operands | training loss, last tenth | over that without 8 bits |\n| --- | --- | --- |")
    for name, own in VARIANTS.items():
        # A process each: the number of emulated devices is fixed when JAX starts.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found[name] = pool.submit(curve, steps, [*own, *keys]).result()
        last, without = (found[key][-2:].mean() for key in (name, "dtype"))
        print(f"| {name} | {last:.4f} | {100 * (last / without - 1):+.2f} % |", flush=True)
    with open(folder / "precision.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *found])
        writer.writerows(zip(at, *(map("{:.4f}".format, losses) for losses in found.values()), strict=True))


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    main(Path(sys.argv[1]), count, sys.argv[3:])
