"""A simulated step as a picture: compute and links of every device over time, and two parts of it enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mstrain.timeline import Timeline

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
    """The events where `chosen` is true, by their start."""
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


def draw_step(axis: Axes, timeline: Timeline, kinds: np.ndarray, rows: list[Row]) -> None:
    """The whole step: the height of a color is the part of the time that the row is busy with it."""
    edges = np.linspace(0, timeline.seconds, BINS + 1)
    for number, row in enumerate(rows):
        bottom = np.full(BINS, number + 0.45)
        for kind, part in enumerate(busy_parts(timeline, kinds, row, edges)):
            top = bottom - 0.9 * part
            low, high = (np.append(level, level[-1]) for level in (bottom, top))
            axis.fill_between(1e3 * edges, low, high, step="post", color=COLORS[KINDS[kind]], linewidth=0)
            bottom = top
    label_microbatches(axis, timeline, kinds, rows)
    axis.set_xlim(0, 1e3 * timeline.seconds)
    axis.set_title("the whole step; full height: busy all the time", fontsize=8, loc="left")


def label_microbatches(axis: Axes, timeline: Timeline, kinds: np.ndarray, rows: list[Row]) -> None:
    """The number of the microbatch on every pass that is long enough."""
    if "microbatch" not in timeline.args:
        return
    microbatch = np.asarray(timeline.args["microbatch"], float)
    for number, row in enumerate(rows):
        mine = in_order(timeline, np.isin(timeline.lane, row.lanes) & np.isfinite(microbatch) & row.compute)
        if not len(mine):
            continue
        begins = np.flatnonzero(np.diff(microbatch[mine], prepend=np.nan) != 0)
        for first, last in zip(begins, [*(begins[1:] - 1), len(mine) - 1]):
            start = timeline.start[mine[first]]
            end = timeline.start[mine[last]] + timeline.duration[mine[last]]
            if end - start > timeline.seconds / 60:
                text = f"{microbatch[mine[first]]:.0f}"
                axis.text(float(500 * (start + end)), number, text, ha="center", va="center", fontsize=6)


def parts_of(timeline: Timeline, row: Row) -> dict[str, tuple[float, float]]:
    """Intervals of a forward and a backward pass to enlarge, in the middle of the passes; none of short programs."""
    mine = in_order(timeline, timeline.lane == row.lanes[0])
    if len(mine) < 4 * ENLARGED:
        return {}
    grads = np.array([name.endswith("Grad") for name in timeline.names])[timeline.name[mine]]
    found, before = {}, int(grads.argmax()) if grads.any() else len(mine)  # later ones may be recomputed
    for name, places in (("a forward pass", np.arange(before)), ("a backward pass", np.flatnonzero(grads))):
        if len(places) > ENLARGED:
            first = places[len(places) // 4]
            last = mine[min(first + ENLARGED, len(mine) - 1)]
            found[name] = (timeline.start[mine[first]], timeline.start[last] + timeline.duration[last])
    return found


def draw_part(axis: Axes, timeline: Timeline, kinds: np.ndarray, rows: list[Row], begin: float, end: float) -> None:
    """Every event between two moments."""
    seen = (timeline.start < end) & (timeline.start + timeline.duration > begin)
    for number, row in enumerate(rows):
        mine = seen & np.isin(timeline.lane, row.lanes)
        for kind in np.unique(kinds[mine]):
            events = mine & (kinds == kind)
            spans = 1e3 * np.column_stack([timeline.start[events], timeline.duration[events]])
            color = COLORS[KINDS[kind]]
            axis.broken_barh(spans.tolist(), (number - 0.45, 0.9), color=color, edgecolor="white", linewidth=0.4)
    axis.set_xlim(1e3 * begin, 1e3 * end)


def plot_gantt(
    timeline: Timeline, path: str | Path, most: int | None = None, devices: Sequence[int] | None = None
) -> Path:
    """Draws the step and, of the first device, a part of a forward and of a backward pass; returns `path`.

    With `devices` only theirs, in that order; with `most` at most so many rows, those of links left out first.
    """
    rows, kinds = rows_of(timeline, devices, most), event_kinds(timeline)
    own = [row for row in rows_of(timeline, devices, None) if row.device == rows[0].device]
    parts = parts_of(timeline, own[0])
    heights = [len(rows), *[len(own)] * len(parts)]
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(heights) + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    draw_step(panels[0], timeline, kinds, rows)
    for axis, (name, (begin, end)) in zip(panels[1:], parts.items()):
        draw_part(axis, timeline, kinds, own, begin, end)
        axis.set_title(f"part of {name} on {timeline.lanes[own[0].lanes[0]].process}", fontsize=8, loc="left")
    for axis, shown in zip(panels, [rows, *[own] * len(parts)]):
        axis.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=7)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds")
    present = [KINDS[kind] for kind in np.unique(kinds)]
    handles = [Patch(color=COLORS[kind], label=kind) for kind in present]
    figure.legend(handles=handles, ncols=len(present), loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)
    return Path(path)
