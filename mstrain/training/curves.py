"""Pictures of losses, from the files of run directories."""

import io
import re
from pathlib import Path

from mstrain.training import files, json_lines
from mstrain.training.reporter import EVALUATIONS, METRICS


def plot_loss(directory: Path, unigram: float) -> None:
    """Plots training and validation loss of a run into its loss.png, and the loss of a unigram model."""
    figure, axes = _axes("Loss")
    for name, key, style in ((METRICS, "loss", "-"), (EVALUATIONS, "validation_loss", "o-")):
        if points := _points(directory / name, key):
            axes.plot(*zip(*points, strict=True), style, lw=0.8, label="training" if key == "loss" else "validation")
    axes.axhline(unigram, color="grey", ls=":", label="unigram model")
    files.replace(directory / "loss.png", _png(figure, axes))


def validation_curves(runs: dict[str, Path]) -> bytes | None:
    """A PNG of the validation losses of `runs`, {"KEY=VALUE KEY=VALUE": run_dir}; None without any.

    Runs that differ in `seed` only have one color.
    """
    found = {chosen: _points(directory / EVALUATIONS, "validation_loss") for chosen, directory in runs.items()}
    found = {chosen: points for chosen, points in found.items() if points}
    if not found:
        return None
    figure, axes = _axes("Validation loss")
    colors: dict[str, str] = {}
    for chosen, points in found.items():
        name = re.sub(r"(^| )seed=\S+", "", chosen).strip() or "all seeds"
        color = colors.setdefault(name, f"C{len(colors)}")
        labeled = any(line.get_label() == name for line in axes.lines)
        axes.plot(*zip(*points, strict=True), ".-", lw=0.8, color=color, label=None if labeled else name)
    return _png(figure, axes)


def _points(path: Path, key: str) -> list[tuple[int, float]]:
    lines = json_lines.read(path)
    return [(line["step"], line[key]) for line in lines if {"step", key} <= line.keys()]


def _axes(title: str):
    from matplotlib.figure import Figure  # here, as its import fails where no folder can be written

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="nats per token", title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def _png(figure, axes) -> bytes:
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    return picture.getvalue()
