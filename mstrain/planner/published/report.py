"""Reports of predicted and measured runs with the errors of terms: tables, CSV and JSON files, and a plot."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.table import Table

from mstrain.display.tables import make_table, write_csv
from mstrain.json_files import write_json
from mstrain.planner.errors import UNMODELED, TermError
from mstrain.planner.published.predict import Prediction

AIM = 0.15  # target of the deviation of predicted / measured from 1
SMALL = 0.005  # errors of terms below this fraction of the step time are in the files only


def published_row(prediction: Prediction) -> dict:
    """A prediction as a flat row, with the seconds of the step by term."""
    row, costed = prediction.row, prediction.costed
    unit, predicted, measured = prediction.compared
    return {
        "name": row.name, "source": row.source, "cluster": row.request.pod.name,
        "unit": "tokens/s a device" if unit == "tokens/s" else "MFU, full attention",
        "predicted": predicted, "measured": measured, "ratio": prediction.ratio, "uncertainty": costed.uncertainty,
        "largest_error": costed.errors[0].name,
        "step_seconds": costed.seconds, "mfu_full_attention": prediction.utilization("full"),
        "mfu_causal_attention": prediction.utilization("causal"), "execution": row.request.style.name,
        "execution_inferred": row.inferred, "microbatch": prediction.microbatch, "interleave": costed.plan.interleave,
        "chosen_by_model": " ".join(sorted(row.search)), "notes": " ".join(row.notes),
        **{f"{name}_seconds": value for name, value in asdict(costed.terms).items()},
    }  # fmt: skip


def write_published(predictions: list[Prediction], folder: Path) -> None:
    """Writes published.csv, with errors of terms as columns, and published.json, with the sources of the errors."""
    rows = [published_row(prediction) for prediction in predictions]
    names = dict.fromkeys(error.name for prediction in predictions for error in prediction.costed.errors)
    blank = {f"{name}_{column}": 0.0 for name in names for column in ("share", "error", "error_of_step")}
    lines = []
    for row, prediction in zip(rows, predictions):
        errors = {
            f"{error.name}_{column}": value
            for error in prediction.costed.errors
            for column, value in (("share", error.share), ("error", error.relative), ("error_of_step", error.of_step))
        }
        lines.append({**row, **blank, **errors})
    write_csv(lines, folder / "published.csv")
    parts = [{"errors": [{**asdict(e), "of_step": e.of_step} for e in p.costed.errors]} for p in predictions]
    write_json({"rows": [{**row, **part} for row, part in zip(rows, parts)]}, folder / "published.json")


def published_table(predictions: list[Prediction]) -> Table:
    """Predicted and measured tokens/s per device, or MFU for runs that published nothing else."""
    columns = ("run", "execution", "unit", "predicted", "measured", "ratio", "+-", "main errors", "MFU full", "causal")
    rows = []
    for each in predictions:
        unit, *values = each.compared
        numbers = [f"{value:.1f}" if unit == "tokens/s" else f"{100 * value:.1f} %" for value in values]
        style = each.row.request.style.name + ("*" if each.row.inferred else "")
        shares = [f"{100 * each.utilization(name):.1f} %" for name in ("full", "causal")]
        error = f"{100 * each.costed.uncertainty:.0f} %"
        mostly = ", ".join(_words(error.name) for error in each.costed.errors[:2])
        rows.append((each.row.name, style, unit, *numbers, f"{each.ratio:.3f}", error, mostly, *shares))
    title = "Published runs as stated: tokens/s per device (MFU if nothing else was published)"
    return make_table(title, columns, rows, ("run", "execution", "unit", "main errors"))


def errors_table(predictions: list[Prediction]) -> Table:
    """The contributions of terms to the standard error of each run, without those below SMALL."""
    rows = [
        (each.row.name, f"{100 * each.costed.uncertainty:.1f}", ", ".join(map(_share, _large(each.costed.errors))))
        for each in predictions
    ]
    title = "Sources of +-: fraction of the step x standard error of the term = standard error of the step, in %"
    columns = ("run", "+-", "terms, the largest error first")
    return make_table(title, columns, rows, (columns[0], columns[2]), wrapped=columns[2:])


def sources_table(predictions: list[Prediction]) -> Table:
    """The standard error of every term in `errors_table`, the unknown quantity that causes it, and its source."""
    found = {}
    for each in predictions:
        for error in _large(each.costed.errors):
            found.setdefault((error.name, error.relative, error.source), error)
    order = sorted(found.values(), key=lambda error: (error.name == UNMODELED, error.name, error.relative))
    rows = [(_words(each.name), f"{100 * each.relative:.0f} %", each.unknown, each.source) for each in order]
    columns = ("term", "+-", "what is not known", "source of +-")
    return make_table("Standard errors of terms", columns, rows, (columns[0], *columns[2:]), wrapped=columns[2:])


def _large(errors: Sequence[TermError]) -> list[TermError]:
    return [error for error in errors if error.of_step >= SMALL]


def _share(error: TermError) -> str:
    if error.name == UNMODELED:
        return f"{UNMODELED} {100 * error.of_step:.1f}"
    return f"{_words(error.name)} {100 * error.share:.0f} x {100 * error.relative:.0f} = {100 * error.of_step:.1f}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def closing_line(predictions: list[Prediction]) -> str:
    """The median and the largest error, and what `+-` and `*` mean."""
    errors = {prediction.row.name: abs(prediction.ratio - 1) for prediction in predictions}
    worst = max(errors, key=lambda name: errors[name])
    outside = sum(error > AIM for error in errors.values())
    return (
        f"{len(predictions)} runs: median error {100 * statistics.median(errors.values()):.1f} %, largest "
        f"{100 * errors[worst]:.1f} % ({worst}), {outside} outside {100 * AIM:.0f} %. "
        "+- is the standard error that the model predicts. "
        "* marks an execution style that is inferred from the row's texts; plan.execution states one."
    )


def plot_published(predictions: list[Prediction], path: Path) -> Path:
    """Plots predicted / measured of every row with the model's standard error, and the fractions of its terms.

    The gray band is the target (AIM). The length of a bar is the standard error of a run; its parts are proportional to
    the variances of the terms. Returns `path`.
    """
    figure = Figure(figsize=(12, 2 + 0.3 * len(predictions)), layout="constrained")
    axes, parts = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
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
    _plot_errors(parts, predictions)
    figure.savefig(path, dpi=150)
    return path


def _plot_errors(axes, predictions: list[Prediction]) -> None:
    """Plots one bar per row, as long as its standard error in %, divided in proportion to the variances of terms."""
    places = range(len(predictions))
    each = [{error.name: error.of_step**2 for error in prediction.costed.errors} for prediction in predictions]
    totals = {name: sum(row.get(name, 0.0) for row in each) for row in each for name in row}
    left = [0.0] * len(predictions)
    for number, name in enumerate(sorted(totals, key=lambda name: -totals[name])):
        widths = [100 * row.get(name, 0.0) / p.costed.uncertainty for row, p in zip(each, predictions)]
        axes.barh(places, widths, left=left, color=colormaps["tab20"](number), label=_words(name))
        left = [begin + width for begin, width in zip(left, widths)]
    axes.set(xlabel="standard error in % of the step; parts: fractions of its variance", title="Standard error by term")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
