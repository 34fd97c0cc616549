"""Pictures of plans and simulations. Every function writes one file; its suffix picks the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mstrain.simulator.gantt import plot_gantt
from mstrain.simulator.simulate import Simulation
from mstrain.timeline import Timeline, first_events, write_perfetto

TRACE_EVENTS = 150_000  # written; a longer simulation is cut there, so that the trace can be opened
GANTT_LANES = 24
MARKERS = "osD^vP*Xhp"


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure; returns `path`."""
    figure.savefig(path, bbox_inches="tight", dpi=200)
    return Path(path)


def _memory_axis(what: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 3.5))
    axis = figure.subplots()
    axis.set(xlabel="Seconds", ylabel=f"{what} (GB)")
    axis.grid(alpha=0.3)
    return figure, axis


def plot_categories(result: Simulation, device: int, path: str | Path) -> Path:
    """Live memory (GB) of one device over time, its categories on top of each other."""
    figure, axis = _memory_axis(f"Live memory of device {device}")
    uses = {name: use.timelines().get(device) for name, use in result.memory_by_category.items()}
    series = {name: use for name, use in uses.items() if use}
    moments = np.unique(np.concatenate([*(time for time, _ in series.values()), [result.seconds]]))
    levels = [
        np.append(0, total)[np.searchsorted(time, moments, side="right")] / 1e9 for time, total in series.values()
    ]
    axis.stackplot(moments, levels, labels=list(series), step="post")
    axis.legend(fontsize=7, loc="lower right")
    return save_figure(figure, path)


def plot_memory(timeline: Timeline, path: str | Path, devices: Sequence[int] | None = None) -> Path:
    """Live memory (GB) of every device (of `devices` only) over time, from the counters of the timeline."""
    figure, axis = _memory_axis("Live memory")
    shown = [each for each in timeline.counters if each.name == "live memory"]
    shown = [each for each in shown if devices is None or each.device in devices]
    for color, counter in zip(colormaps["viridis"](np.linspace(0, 0.9, max(1, len(shown)))), shown):
        times, values = np.append(counter.time, timeline.seconds), np.append(counter.value, counter.value[-1])
        axis.step(times, values / 1e9, where="post", color=color, label=f"device {counter.device}", linewidth=1)
    if len(shown) <= 16:
        axis.legend(fontsize=7, ncols=2)
    return save_figure(figure, path)


def write_pictures(result: Simulation, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """trace.json.gz for ui.perfetto.dev, and pictures; returns their names.

    They show lanes over time, memory over time (both of `devices` only), and memory of the fullest device by category.
    """
    timeline = result.timeline()
    shown = first_events(timeline, TRACE_EVENTS)
    write_perfetto(shown, folder / "trace.json.gz")
    plot_gantt(shown, folder / "gantt.png", GANTT_LANES, devices)
    plot_memory(timeline, folder / "memory.png", devices)
    peaks = result.memory.peak_bytes
    plot_categories(result, max(peaks, key=peaks.__getitem__), folder / "memory_by_category.png")
    return ["trace.json.gz (ui.perfetto.dev)", "gantt.png", "memory.png", "memory_by_category.png"]
