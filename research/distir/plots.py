"""The pictures of DistIR's notebook. Every function writes one file; its suffix picks the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mstrain.simulator.plots import MARKERS, save_figure
from research.distir.grid import Row


def _degrees_axis(axis: Axes, degrees: Sequence[int], labels: tuple[str, str]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(degrees, [str(degree) for degree in degrees])
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.grid(alpha=0.3)


def plot_grid(rows: Sequence[Row], path: str | Path) -> Path:
    """Throughput against tensor degree, one panel per data degree, one line per number of microbatches."""
    counts, panels = sorted({row.num_microbatches for row in rows}), sorted({row.dp_degree for row in rows})
    degrees = sorted({row.hp_degree for row in rows})
    figure = Figure(figsize=(3 * len(panels), 3))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axis, data in zip(axes, panels):
        for marker, count in zip(cycle(MARKERS), counts):
            mine = [row for row in rows if (row.dp_degree, row.num_microbatches) == (data, count)]
            points = sorted((row.hp_degree, row.throughput) for row in mine)
            label = "No pipeline parallelism" if count == 1 else f"{count} microbatches"
            axis.plot(*zip(*points) if points else ([], []), marker=marker, label=label)
        throughput = "Throughput (samples/second)" if data == panels[0] else ""
        _degrees_axis(axis, degrees, ("Tensor parallel degree", throughput))
        axis.set_title("No data parallelism" if data == 1 else f"{data} data parallel partitions", fontsize=9)
    legend = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(counts), "frameon": False}
    figure.legend(*axes[0].get_legend_handles_labels(), **legend)
    return save_figure(figure, path)


def plot_lines(
    table: Sequence[Mapping], x: str, y: str, series: str | None, path: str | Path, labels: tuple[str, str],
    scale: str = "linear",
) -> Path:  # fmt: skip
    """Column `y` against column `x` of `table`, one line per value of column `series`; log x with base 2.

    `scale` is that of the y axis: linear or log.
    """
    figure = Figure(figsize=(5, 3.5))
    axis = figure.subplots()
    names = sorted({row[series] for row in table}) if series else [None]
    for name, marker, color in zip(names, cycle(MARKERS), colormaps["Blues"](np.linspace(0.4, 1.0, len(names)))):
        points = sorted((row[x], row[y]) for row in table if series is None or row[series] == name)
        axis.plot(*zip(*points), marker=marker, color=color, label=f"{series} {name}")
    _degrees_axis(axis, sorted({row[x] for row in table}), labels)
    axis.set_yscale(scale)
    if series:
        axis.legend()
    return save_figure(figure, path)


def plot_memory_against_throughput(rows: Sequence[Row], path: str | Path) -> Path:
    """Peak memory (GB) against throughput of every plan, coloured by pipeline degree."""
    figure = Figure(figsize=(5, 3.5))
    axis = figure.subplots()
    for marker, pipeline in zip(cycle(MARKERS), sorted({row.pp_degree for row in rows})):
        points = [(row.throughput, row.peak_memory / 1e9) for row in rows if row.pp_degree == pipeline]
        axis.scatter(*zip(*points), marker=marker, label=f"pipeline {pipeline}", alpha=0.8)
    axis.set(xlabel="Throughput (samples/second)", ylabel="Peak memory (GB per device)")
    axis.legend()
    axis.grid(alpha=0.3)
    return save_figure(figure, path)
