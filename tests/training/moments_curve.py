"""What moments in bf16 do to a curve: float32, bf16 rounded to nearest, bf16 rounded stochastically.

`python -m tests.training.moments_curve FOLDER [STEPS]` trains a small GPT on the standard library of Python three times
with each of two decay rates of the second moment, prints the mean training loss of the last tenth of the steps, and
writes moments.csv (mean loss of every twentieth of the steps) and moments.png.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import mstrain

KEYS = [
    "mesh=1x1", "parallel=gspmd", "model=tiny", "model.width=32", "model.heads=2", "batch=8", "seq=32", "dtype=f32",
    "optimizer.schedule=constant",
]  # fmt: skip
MOMENTS = {
    "f32": [],
    "bf16, nearest": ["optimizer.moments=bf16"],
    "bf16, stochastic": ["optimizer.moments=bf16", "optimizer.rounding=stochastic"],
}
DECAYS = (0.95, 0.999)  # b2


def curve(steps: int, b2: float, keys: list[str]) -> np.ndarray:
    """Mean training loss of every twentieth of the steps."""
    state, step, feed = mstrain.trainer(*KEYS, f"steps={steps}", f"optimizer.b2={b2}", *keys)
    losses = []
    for k in range(steps):
        state, metrics = step(state, feed(k))
        losses.append(metrics["loss"])
    return np.array(losses, np.float64).reshape(20, -1).mean(axis=1)


def main(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {(b2, name): curve(steps, b2, keys) for b2 in DECAYS for name, keys in MOMENTS.items()}
    at = [steps * (part + 1) // 20 for part in range(20)]
    with open(folder / "moments.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *(f"b2={b2} {name}" for b2, name in found)])
        writer.writerows(zip(at, *(map("{:.4f}".format, losses) for losses in found.values()), strict=True))
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, b2 in zip(figure.subplots(1, 2, sharey=True), DECAYS, strict=True):
        for name in MOMENTS:
            axes.plot(at, found[b2, name], label=name)
        axes.set(title=f"b2={b2}", xlabel="step", ylabel="training loss")
        axes.legend()
    figure.savefig(folder / "moments.png", dpi=80)
    print("| b2 | moments | training loss, last tenth |\n| --- | --- | --- |")
    for (b2, name), losses in found.items():
        print(f"| {b2} | {name} | {losses[-2:].mean():.4f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
