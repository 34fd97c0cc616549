"""A simulated step as a picture: compute and links of every device over time, and two parts of it enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mstrain.timeline import Timeline, of_events

COLORS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "optimizer": "tab:green",
    "all_gather": "tab:red",
    "reduce_scatter": "tab:purple",
    "all_reduce": "tab:pink",
    "ppermute, send": "tab:brown",
}
KINDS = list(COLORS)
_COLLECTIVES = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce"}
_OPTIMIZERS = ("SGD", "Adam", "ProfiledUpdate")
BINS = 600  # columns of the picture of a whole step
ENLARGED = 30  # compute operations of an enlarged part


@dataclass(frozen=True)
class Row:
    """Compute or the links of one axis of a device: the lanes drawn in it, both directions of a link together."""

    name: str
    device: int
    lanes: tuple[int, ...]
    compute: bool


def rows_of(timeline: Timeline, devices: Sequence[int] | None, most: int | None) -> list[Row]:
    """Rows device by device, compute first; with more than `most` those of links are left out first."""
    lanes: dict[tuple[int, str], list[int]] = {}
    for number, lane in enumerate(timeline.lanes):
        name = lane.thread.removesuffix(" out").removesuffix(" in")
        lanes.setdefault((lane.device, name), []).append(number)
    order = list(devices) if devices is not None else sorted({device for device, _ in lanes})
    rows = [
        Row(f"{timeline.lanes[numbers[0]].process} {name}", device, tuple(numbers), name == "compute")
        for (device, name), numbers in lanes.items()
        if device in order
    ]
    rows.sort(key=lambda row: (order.index(row.device), not row.compute, row.name))
    return [row for row in rows if row.compute][:most] if most is not None and len(rows) > most else rows


def event_kinds(timeline: Timeline) -> np.ndarray:
    """Index into KINDS of every event."""
    compute = [
        "backward" if name.endswith("Grad") else "optimizer" if name in _OPTIMIZERS else "forward"
        for name in timeline.names
    ]
    links = [_COLLECTIVES.get(name, KINDS[-1]) for name in timeline.names]
    numbers = np.array([[KINDS.index(kind) for kind in kinds] for kinds in (compute, links)])
    return numbers[timeline.communication.astype(int), timeline.name]


def in_order(timeline: Timeline, chosen: np.ndarray) -> np.ndarray:
    mine = np.flatnonzero(chosen)
    return mine[np.argsort(timeline.start[mine], kind="stable")]


def busy_parts(timeline: Timeline, kinds: np.ndarray, row: Row, edges: np.ndarray) -> np.ndarray:
    """(kinds, bins) part of every interval in which the row does a kind of work; of two directions the busier."""
    found = np.zeros((len(KINDS), len(edges) - 1))
    for lane in row.lanes:
        for kind in np.unique(kinds[timeline.lane == lane]):
            mine = in_order(timeline, (timeline.lane == lane) & (kinds == kind))
            start, duration = timeline.start[mine], timeline.duration[mine]
            moments = np.column_stack([start, start + duration]).ravel()
            done = np.cumsum(np.column_stack([np.zeros_like(duration), duration]).ravel())
            part = np.diff(np.interp(edges, moments, done, left=0.0)) / np.diff(edges)
            found[kind] = np.maximum(found[kind], part)
    return found / np.maximum(found.sum(axis=0), 1.0)


def draw(axis: Axes, timeline: Timeline, kinds: np.ndarray, rows: list[Row], begin: float, end: float) -> None:
    """An interval: the height of a color is the part of the time that the row is busy; few events are set apart."""
    edges = np.linspace(begin, end, BINS + 1)
    seen = np.isin(timeline.lane, [lane for row in rows for lane in row.lanes])
    seen &= (timeline.start < end) & (timeline.start + timeline.duration > begin)
    for number, row in enumerate(rows):
        parts = 0.9 * busy_parts(timeline, kinds, row, edges)
        levels = np.pad(np.vstack([np.full(BINS, number + 0.45), -parts]), ((0, 0), (0, 1)), mode="edge")
        axis.stackplot(1e3 * edges, levels, colors=["none", *COLORS.values()], step="post", linewidth=0)
        if seen.sum() < 10 * ENLARGED:
            starts = timeline.start[seen & np.isin(timeline.lane, row.lanes)]
            axis.vlines(1e3 * starts, number - 0.45, number + 0.45, color="white", linewidth=0.4)
    axis.set_xlim(1e3 * begin, 1e3 * end)
    axis.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


def label_microbatches(axis: Axes, timeline: Timeline, rows: list[Row]) -> None:
    """The number of the microbatch on every pass that is long enough."""
    microbatch = np.asarray(timeline.args.get("microbatch", np.full(timeline.num_events, np.nan)), float)
    for number, row in enumerate(rows):
        mine = in_order(timeline, np.isin(timeline.lane, row.lanes) & np.isfinite(microbatch) & row.compute)
        for events in np.split(mine, np.flatnonzero(np.diff(microbatch[mine])) + 1) if len(mine) else ():
            start, end = timeline.start[events[0]], timeline.start[events[-1]] + timeline.duration[events[-1]]
            if end - start > timeline.seconds / 60:
                text, middle = f"{microbatch[events[0]]:.0f}", float(500 * (start + end))
                axis.text(middle, number, text, ha="center", va="center", fontsize=6)


def parts_of(timeline: Timeline, row: Row) -> dict[str, tuple[float, float]]:
    """Intervals of a forward and a backward pass to enlarge, in the middle of the passes; none of short programs."""
    mine = in_order(timeline, timeline.lane == row.lanes[0])
    grads = np.array([name.endswith("Grad") for name in timeline.names])[timeline.name[mine]]
    before = int(grads.argmax()) if grads.any() else len(mine)  # later ones may be recomputed
    found = {}
    for name, places in (("a forward pass", np.arange(before)), ("a backward pass", np.flatnonzero(grads))):
        if len(mine) >= 4 * ENLARGED and len(places) > ENLARGED:
            first = places[len(places) // 4]
            last = mine[min(first + ENLARGED, len(mine) - 1)]
            found[name] = (timeline.start[mine[first]], timeline.start[last] + timeline.duration[last])
    return found


def plot_gantt(
    timeline: Timeline, path: str | Path, most: int | None = None, devices: Sequence[int] | None = None
) -> Path:
    """Draws the step and, of the first device, a part of a forward and of a backward pass; returns `path`.

    With `devices` only theirs, in that order; with `most` at most so many rows, those of links left out first.
    """
    rows, seconds = rows_of(timeline, devices, most), timeline.seconds
    own = [row for row in rows_of(timeline, devices, None) if row.device == rows[0].device]
    timeline = of_events(timeline, np.isin(timeline.lane, [lane for row in (*rows, *own) for lane in row.lanes]))
    kinds = event_kinds(timeline)
    parts = parts_of(timeline, own[0])
    heights = [len(rows), *[len(own)] * len(parts)]
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(heights) + 0.3 * sum(heights)), layout="constrained")
    whole, *panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    draw(whole, timeline, kinds, rows, 0.0, seconds)
    label_microbatches(whole, timeline, rows)
    whole.set_title("the whole step; full height: busy all the time", fontsize=8, loc="left")
    for axis, (name, interval) in zip(panels, parts.items()):
        draw(axis, timeline, kinds, own, *interval)
        axis.set_title(f"part of {name} on {timeline.lanes[own[0].lanes[0]].process}", fontsize=8, loc="left")
    [whole, *panels][-1].set_xlabel("milliseconds")
    present = [KINDS[kind] for kind in np.unique(kinds)]
    handles = [Patch(color=COLORS[kind], label=kind) for kind in present]
    figure.legend(handles=handles, ncols=len(present), loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)
    return Path(path)
