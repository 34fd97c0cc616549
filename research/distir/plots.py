"""The plots of DistIR's notebook: one column of a table against another."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from mstrain.display.plots import MARKERS, save_figure

LABELS = {
    "throughput": "Throughput (samples/second)", "hp_degree": "Tensor parallel degree",
    "peak_memory": "Peak memory per device", "milliseconds": "Simulation time (ms)",
    "dp_degree": "data", "pp_degree": "pipeline", "num_microbatches": "microbatches",
}  # fmt: skip


def plot_columns(
    table: Sequence[Mapping], x: str, y: str, path: str | Path, series: str | None = None, panel: str | None = None,
    log: str = "x", line: str = "-",
) -> Path:  # fmt: skip
    """Plots column `y` of `table` against column `x` and writes the figure to `path`, whose suffix is its format.

    Args:
      series: column with one line per value; panel: column with one subplot per value.
      log: the axes with a logarithmic scale, "x" (base 2), "y", "xy" or "".
      line: line style of matplotlib; "" plots points only.
    """
    panels, names = (sorted({row[column] for row in table}) if column else [None] for column in (panel, series))
    figure = Figure(figsize=(5 if panel is None else 3 * len(panels), 3.5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axis, part in zip(axes, panels):
        for name, marker, shade in zip(names, cycle(MARKERS), np.linspace(0.3, 1.0, len(names))):
            mine = [
                row
                for row in table
                if (panel is None or row[panel] == part) and (series is None or row[series] == name)
            ]
            points = sorted((row[x], row[y]) for row in mine)
            label = f"{LABELS.get(series or '', series)} {name}"
            axis.plot(
                *zip(*points) if points else ([], []), line, marker=marker, color=colormaps["Blues"](shade), label=label
            )
        axis.set_xlabel(LABELS.get(x, x))
        axis.set_title("" if panel is None else f"{LABELS.get(panel, panel)} {part}", fontsize=9)
        axis.grid(alpha=0.3)
    if "x" in log:
        axes[0].set_xscale("log", base=2)
        ticks = sorted({row[x] for row in table})
        axes[0].set_xticks(ticks, [str(tick) for tick in ticks])
    axes[0].set_yscale("log" if "y" in log else "linear")
    axes[0].set_ylabel(LABELS.get(y, y))
    if y == "peak_memory":
        axes[0].yaxis.set_major_formatter(EngFormatter("B"))
    if series:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=min(len(names), 6), frameon=False)
    return save_figure(figure, path)
