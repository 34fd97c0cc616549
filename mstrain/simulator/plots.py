"""Pictures of plans and simulations. Every function writes one file; its suffix picks the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mstrain.simulator.simulate import Simulation
from mstrain.timeline import Timeline, first_events, write_perfetto

TRACE_EVENTS = 150_000  # written; a longer simulation is cut there, so that the trace can be opened
GANTT_LANES = 24
MARKERS = "osD^vP*Xhp"
COLOURS = {"forward": "tab:blue", "backward": "tab:orange", "optimizer": "tab:green", "communication": "tab:red"}
# Bookkeeping between the operations of a pass belongs to that pass.
_INHERITS = frozenset({"Add", "Identity", "Concat", "Split"})


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure; returns `path`."""
    figure.savefig(path, bbox_inches="tight", dpi=200)
    return Path(path)


def _bars(timeline: Timeline, gap: float = 0.0) -> list[tuple[int, str, float, float, float]]:
    """Runs of one lane, kind of work and microbatch: (lane, kind, microbatch, start, end).

    Pauses of up to `gap` seconds do not end a run.
    """
    microbatch = timeline.args.get("microbatch", np.full(timeline.num_events, np.nan))
    bars: list[tuple[int, str, float, float, float]] = []
    for event in np.lexsort((np.arange(timeline.num_events), timeline.start, timeline.lane)).tolist():
        lane, name = int(timeline.lane[event]), timeline.names[int(timeline.name[event])]
        start, count = float(timeline.start[event]), float(microbatch[event])
        last = bars[-1] if bars and bars[-1][0] == lane else None
        if timeline.communication[event]:
            kind = "communication"
        elif name in _INHERITS and last and last[1] != "communication":
            kind = last[1]
        else:
            kind = "backward" if name.endswith("Grad") else "forward"
            kind = "optimizer" if name in ("SGD", "Adam", "ProfiledUpdate") else kind
        end = start + float(timeline.duration[event])
        touching = last is not None and start - last[4] <= max(gap, 1e-9 + 1e-6 * end)
        if touching and last[1] == kind and last[2] == count:
            bars[-1] = (lane, kind, count, last[3], end)
        elif end > start:
            bars.append((lane, kind, count, start, end))
    return bars


def plot_gantt(
    timeline: Timeline, path: str | Path, most: int | None = None, devices: Sequence[int] | None = None
) -> Path:
    """What every lane does over time, passes marked with their microbatch where there is room.

    With `devices` only theirs, in that order.
    Compute lanes come first where there are more than `most` lanes, and those beyond are not drawn; pauses
    too short to be seen are then drawn over.
    """
    gap = 0.0 if most is None else timeline.seconds / 300
    order = list(devices) if devices is not None else sorted({lane.device for lane in timeline.lanes})
    place = {device: number for number, device in enumerate(order)}
    shown = [lane for lane, what in enumerate(timeline.lanes) if what.device in place]
    rows = sorted(shown, key=lambda lane: (place[timeline.lanes[lane].device], lane))
    if most is not None and len(rows) > most:
        rows = sorted(rows, key=lambda lane: timeline.lanes[lane].thread != "compute")[:most]
    figure = Figure(figsize=(12, 0.6 + 0.35 * len(rows)))
    axis = figure.subplots()
    bars = [bar for bar in _bars(timeline, gap) if bar[0] in set(rows)]
    height = {lane: row for row, lane in enumerate(rows)}
    for kind, colour in COLOURS.items():
        for lane in rows:
            spans = [(start, end - start) for which, what, _, start, end in bars if (which, what) == (lane, kind)]
            axis.broken_barh(spans, (height[lane] - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
    room = timeline.seconds / 120
    for lane, kind, microbatch, start, end in bars:
        if microbatch == microbatch and kind in ("forward", "backward") and end - start > room:
            axis.text((start + end) / 2, height[lane], f"{microbatch:.0f}", ha="center", va="center", fontsize=6)
    axis.set_yticks(
        range(len(rows)), [f"{timeline.lanes[lane].process} {timeline.lanes[lane].thread}" for lane in rows]
    )
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, timeline.seconds)
    axis.set_xlabel("Seconds")
    axis.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        frameon=False,
    )
    return save_figure(figure, path)


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
