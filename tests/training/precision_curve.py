"""What products in 8 bits do to a curve: no 8-bit operands, int8, float8, and int8 in the gathers alone.

    python -m tests.training.precision_curve FOLDER steps=2000 [key=value ...]

trains `model=small` on the standard library of Python with each, one after the other (keys choose another model or
batch). Every curve is a run of train.py below FOLDER, so the same command resumes a curve that was interrupted and
repeats none that is finished. FOLDER/precision.csv has the validation losses by step, FOLDER/precision.png draws them,
and a table compares the last ones. Gathers need several devices, so `travel=` has a mesh; all others have one device,
because their results do not depend on the mesh.
"""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np

from mstrain.training import json_lines
from mstrain.training.curves import validation_curves
from mstrain.training.reporter import EVALUATIONS, METRICS

WITHOUT = "dtype"
VARIANTS = {
    WITHOUT: ["mesh=1x1"],
    "precision=int8": ["mesh=1x1", "precision=int8"],
    "travel=int8": ["mesh=2x2", "travel=int8"],
    "precision=fp8": ["mesh=1x1", "precision=fp8"],
    "dtype on 2x2": ["mesh=2x2"],  # how far curves part that differ in the last bits only
}
KEYS = ["sample.tokens=0", "eval.batches=64", "checkpoint.keep=1"]


def write(folder: Path, runs: dict[str, Path]) -> None:
    """The table, precision.csv and precision.png of the curves that are there."""
    losses = {name: {x["step"]: x["validation_loss"] for x in json_lines.read(run / EVALUATIONS)}
              for name, run in runs.items()}  # fmt: skip
    with open(folder / "precision.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *losses])
        for step in losses[WITHOUT]:
            writer.writerow([step, *(format(found[step], ".4f") if step in found else "" for found in losses.values())])
    if picture := validation_curves(runs):
        (folder / "precision.png").write_bytes(picture)
    print("| operands | steps | validation loss | over that without 8 bits | training loss, last tenth |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in losses.items():
        step = max(found)
        over = 100 * (found[step] / losses[WITHOUT][step] - 1)
        training = [x["loss"] for x in json_lines.read(runs[name] / METRICS)]
        tenth = np.mean(training[-len(training) // 10 :])
        print(f"| {name} | {step} | {found[step]:.4f} | {over:+.2f} % | {tenth:.4f} |", flush=True)


def main(folder: Path, keys: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = {}
    for name, own in VARIANTS.items():
        runs[name] = folder / name.replace(" ", "_")
        arguments = [*KEYS, *own, *keys, f"run_dir={runs[name]}"]
        with open(folder / "log.txt", "a") as log:
            subprocess.run([sys.executable, "-m", "mstrain", "train", *arguments], check=True, stdout=log)
        write(folder, runs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
