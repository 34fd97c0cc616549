"""Predicted beside measured: a table, CSV, JSON and one plot."""

import statistics
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from mstrain.display.tables import make_table, write_csv
from mstrain.json_files import write_json
from mstrain.planner.published.predict import Prediction

AIM = 0.15  # of a row's ratio from 1


def published_row(prediction: Prediction) -> dict:
    """One row as flat columns; seconds of the step by term."""
    row, costed = prediction.row, prediction.costed
    unit, predicted, measured = prediction.compared
    return {
        "name": row.name, "source": row.source,
        "unit": "tokens/s a device" if unit == "tokens/s" else "MFU, full attention",
        "predicted": predicted, "measured": measured, "ratio": prediction.ratio, "uncertainty": costed.uncertainty,
        "step_seconds": costed.seconds, "mfu_full_attention": prediction.utilization("full"),
        "mfu_causal_attention": prediction.utilization("causal"), "execution": row.request.style.name,
        "execution_inferred": row.inferred, "microbatch": prediction.microbatch, "interleave": costed.plan.interleave,
        "chosen_by_model": " ".join(sorted(row.search)),
        **{f"{name}_seconds": value for name, value in asdict(costed.terms).items()},
    }  # fmt: skip


def write_published(predictions: list[Prediction], folder: Path) -> None:
    rows = [published_row(prediction) for prediction in predictions]
    write_csv(rows, folder / "published.csv")
    write_json({"rows": rows}, folder / "published.json")


def published_table(predictions: list[Prediction]) -> Table:
    """Predicted and measured tokens/s a device, or MFU where nothing else was published."""
    columns = ("run", "execution", "unit", "predicted", "measured", "ratio", "+-", "MFU full", "causal")
    rows = []
    for each in predictions:
        unit, *values = each.compared
        numbers = [f"{value:.1f}" if unit == "tokens/s" else f"{100 * value:.1f} %" for value in values]
        style = each.row.request.style.name + ("*" if each.row.inferred else "")
        shares = [f"{100 * each.utilization(name):.1f} %" for name in ("full", "causal")]
        error = f"{100 * each.costed.uncertainty:.0f} %"
        rows.append((each.row.name, style, unit, *numbers, f"{each.ratio:.3f}", error, *shares))
    title = "Published runs as stated: tokens/s a device (MFU where nothing else was published)"
    return make_table(title, columns, rows, ("run", "execution", "unit"))


def closing_line(predictions: list[Prediction]) -> str:
    """The median and the largest error, and a legend of the marks."""
    errors = {prediction.row.name: abs(prediction.ratio - 1) for prediction in predictions}
    worst = max(errors, key=lambda name: errors[name])
    outside = sum(error > AIM for error in errors.values())
    return (
        f"{len(predictions)} runs: median error {100 * statistics.median(errors.values()):.1f} %, largest "
        f"{100 * errors[worst]:.1f} % ({worst}), {outside} outside {100 * AIM:.0f} %. "
        "+- is the model's own standard error. "
        "* the execution style follows from the row's texts; plan.execution states it."
    )


def plot_published(predictions: list[Prediction], path: Path) -> Path:
    """Predicted over measured of every row with the model's standard error; the band is the aim."""
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(predictions)), layout="constrained")
    axes = figure.subplots()
    places = range(len(predictions))
    ratios = [prediction.ratio for prediction in predictions]
    errors = [prediction.ratio * prediction.costed.uncertainty for prediction in predictions]
    axes.axvspan(1 - AIM, 1 + AIM, color="0.92")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.errorbar(ratios, places, xerr=errors, fmt="o", capsize=3, markersize=4)
    axes.set_yticks(list(places), [prediction.row.name for prediction in predictions], parse_math=False)
    axes.invert_yaxis()
    axes.set(xlabel="predicted / measured, with the model's standard error", title="Published runs")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    return path
