"""A tuning as a table, a picture, JSON and CSV."""

import csv
import io
import json
from pathlib import Path

from rich.table import Table

from mstrain.parallel.tuning_result import Candidate, Tuning

COLUMNS = (
    "rank", "rows", "cols", "family", "dataflows", "slices", "seconds", "compute", "exposed", "communication",
    "row_traffic_bytes", "col_traffic_bytes", "row_traffic_seconds", "col_traffic_seconds",
    "row_latency_seconds", "col_latency_seconds", "pipeline_seconds", "why",
)


def _row(rank: int, c: Candidate) -> dict:
    values = (
        rank, c.rows, c.cols, c.family, " ".join(x.dataflow for x in c.choices),
        " ".join(str(x.slices) for x in c.choices), c.seconds, c.compute, c.exposed, c.communication,
        c.traffic_bytes.row, c.traffic_bytes.col, c.traffic.row, c.traffic.col,
        c.latency.row, c.latency.col, c.pipeline, c.why,
    )
    return dict(zip(COLUMNS, values, strict=True))


def explain(tuning: Tuning, limit: int = 10) -> Table:
    """The best `limit` candidates for a terminal; times in ms are predicted for one device and one step."""
    names = ", ".join(choice.name for choice in tuning.best.choices)
    table = Table(title=f"Predicted with {tuning.constants.name}, {tuning.tokens} tokens ({names})",
                  caption=tuning.constants.source)
    for heading in ("mesh", "dataflows", "slices", "why"):
        table.add_column(heading)
    for heading in ("ms", "exposed ms", "row GB", "col GB", "latency ms"):
        table.add_column(heading, justify="right")
    for c in tuning.candidates[:limit]:
        row = _row(0, c)
        table.add_row(
            f"{c.rows}x{c.cols}", row["dataflows"], row["slices"], c.why or "best",
            *(f"{value:.3f}" for value in (
                c.seconds * 1e3, c.exposed * 1e3, c.traffic_bytes.row / 1e9, c.traffic_bytes.col / 1e9,
                max(c.latency.row, c.latency.col) * 1e3)),
        )
    return table


def to_json(tuning: Tuning) -> str:
    """The whole result, with every slice count tried at the winner and why it lost. Seconds and bytes."""
    best = tuning.best
    choices = [
        {"name": c.name, "dataflow": c.dataflow, "slices": c.slices, "transposed": c.transposed,
         "seconds": c.seconds, "compute": c.compute, "exposed": c.exposed, "communication": c.communication,
         "trials": [{"slices": s, "seconds": t, "why": c.why(s)} for s, t in c.trials]}
        for c in best.choices
    ]
    return json.dumps({
        "constants": tuning.constants.name, "source": tuning.constants.source, "tokens": tuning.tokens,
        "mesh": tuning.mesh, "seconds": best.seconds, "compute": best.compute, "exposed": best.exposed,
        "communication": best.communication, "projections": choices,
        "candidates": [_row(i, c) for i, c in enumerate(tuning.candidates, 1)],
        "rejected": [{"rows": r, "cols": c, "why": why} for r, c, why in tuning.rejected],
    }, indent=2) + "\n"


def to_csv(tuning: Tuning) -> str:
    """One line per candidate, best first. Seconds and bytes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(i, c) for i, c in enumerate(tuning.candidates, 1))
    return text.getvalue()


def plot(tuning: Tuning, path: str | Path) -> None:
    """Write the picture: for each mesh shape, compute and exposed communication of its best candidate."""
    from matplotlib.figure import Figure  # imported here: half a second that tuning itself does not need

    shapes = {}
    for c in tuning.candidates:
        shapes.setdefault((c.rows, c.cols), c)
    bars = [shapes[shape] for shape in sorted(shapes)]
    labels = [f"{c.rows}x{c.cols}" for c in bars]
    compute, exposed = [c.compute * 1e3 for c in bars], [c.exposed * 1e3 for c in bars]
    figure = Figure(figsize=(max(5, 0.7 * len(bars) + 2), 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(labels, compute, label="compute", color="tab:blue")
    drawn = axes.bar(labels, exposed, bottom=compute, label="exposed communication", color="tab:orange")
    axes.bar_label(drawn, [" ".join(str(x.slices) for x in c.choices) for c in bars], fontsize=7, padding=2)
    axes.set(xlabel="mesh (rows x cols); slice counts above the bars", ylabel="predicted ms",
             title=f"{tuning.constants.name}, {tuning.tokens} tokens")
    axes.legend()
    figure.savefig(path)
