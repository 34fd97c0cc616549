"""Pictures of plans and simulations. Every function writes one file; its suffix picks the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
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


def plot_categories(result: Simulation, device: int, path: str | Path) -> Path:
    """Live memory (GB) of one device over time, its categories on top of each other."""
    figure = Figure(figsize=(8, 3.5))
    axis = figure.subplots()
    series = {}
    for name, use in result.memory_by_category.items():
        time, total = use.timelines().get(device, (np.zeros(1), np.zeros(1)))
        series[name] = time, total
    moments = np.unique(np.concatenate([time for time, _ in series.values()] + [[result.seconds]]))
    at = {name: np.searchsorted(time, moments, side="right") - 1 for name, (time, _) in series.items()}
    levels = [np.where(at[name] < 0, 0, series[name][1][at[name]]) / 1e9 for name in series]
    axis.stackplot(moments, levels, labels=list(series), step="post")
    axis.set_xlabel("Seconds")
    axis.set_ylabel(f"Live memory of device {device} (GB)")
    axis.legend(fontsize=7, loc="lower right")
    return save_figure(figure, path)


def plot_memory(timeline: Timeline, path: str | Path, devices: Sequence[int] | None = None) -> Path:
    """Live memory (GB) of every device (of `devices` only) over time, from the counters of the timeline."""
    figure = Figure(figsize=(8, 3.5))
    axis = figure.subplots()
    counters = [
        counter
        for counter in timeline.counters
        if counter.name == "live memory" and (devices is None or counter.device in devices)
    ]
    ramp = colormaps["viridis"](np.linspace(0, 0.9, max(1, len(counters))))
    for colour, counter in zip(ramp, counters):
        axis.step(
            np.append(counter.time, timeline.seconds),
            np.append(counter.value, counter.value[-1]) / 1e9,
            where="post",
            color=colour,
            label=f"device {counter.device}",
            linewidth=1,
        )
    axis.set_xlabel("Seconds")
    axis.set_ylabel("Live memory (GB)")
    axis.grid(alpha=0.3)
    if len(counters) <= 16:
        axis.legend(fontsize=7, ncols=2)
    return save_figure(figure, path)


def write_pictures(result: Simulation, folder: Path, devices: Sequence[int] | None = None) -> list[str]:
    """trace.json.gz for ui.perfetto.dev, and pictures: lanes over time, memory over time (of `devices` only),
    memory of the fullest device by category. Returns their names.
    """
    timeline = result.timeline()
    shown = first_events(timeline, TRACE_EVENTS)
    write_perfetto(shown, folder / "trace.json.gz")
    plot_gantt(shown, folder / "gantt.png", GANTT_LANES, devices)
    plot_memory(timeline, folder / "memory.png", devices)
    fullest = max(result.memory.peak_bytes.items(), key=lambda item: item[1])[0]
    plot_categories(result, fullest, folder / "memory_by_category.png")
    return ["trace.json.gz (ui.perfetto.dev)", "gantt.png", "memory.png", "memory_by_category.png"]
