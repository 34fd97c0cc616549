"""Pictures. Every function writes one file; its suffix picks the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from mstrain.timeline import LIVE_MEMORY, Timeline

MARKERS = "osD^vP*Xhp"


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure; returns `path`."""
    figure.savefig(path, bbox_inches="tight", dpi=200)
    return Path(path)


def plot_memory(
    timeline: Timeline, path: str | Path, devices: Sequence[int] | None = None, by_category: bool = False
) -> Path:
    """Live memory (GB) over time of every device, or of `devices`; `by_category`: stacked, of one device."""
    figure = Figure(figsize=(8, 3.5))
    axis = figure.subplots()
    shown = [each for each in timeline.counters if devices is None or each.device in devices]
    shown = [each for each in shown if (each.name != LIVE_MEMORY) == by_category]
    axis.set(xlabel="Seconds", ylabel=f"Live memory{f' of device {shown[0].device}' if by_category else ''} (GB)")
    if by_category:
        moments = np.unique(np.concatenate([*(each.time for each in shown), [timeline.seconds]]))
        levels = [np.append(0, each.value)[np.searchsorted(each.time, moments, side="right")] / 1e9 for each in shown]
        axis.stackplot(moments, levels, labels=[each.name for each in shown], step="post")
    for color, each in zip(colormaps["viridis"](np.linspace(0, 0.9, len(shown))), () if by_category else shown):
        times, values = np.append(each.time, timeline.seconds), np.append(each.value, each.value[-1])
        axis.step(times, values / 1e9, where="post", color=color, label=f"device {each.device}", linewidth=1)
    axis.grid(alpha=0.3)
    if len(shown) <= 16:
        axis.legend(fontsize=7, ncols=1 if by_category else 2, loc="lower right" if by_category else "best")
    return save_figure(figure, path)
