"""Timelines: the events of simulated and compiled schedules.

The simulator and the reader of compiled schedules both produce a `Timeline`. A lane is a unit that runs one event at a
time (a device's compute unit, one link). A timeline is flat arrays with one entry per event. Times are in seconds;
exported files use microseconds, the unit of the Chrome trace format.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

LIVE_MEMORY = "live memory"  # name of the counter of all memory, beside those of its categories


@dataclass(frozen=True)
class Lane:
    """One unit of a `device`: `thread` is its name, such as "compute" or "link out"."""

    device: int
    process: str
    thread: str


@dataclass(frozen=True, eq=False)
class Counter:
    """A quantity over time on one device, such as live memory in bytes; `time` is ascending, in seconds."""

    device: int
    name: str
    time: np.ndarray
    value: np.ndarray


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events on lanes.

    Attributes:
      lanes: the lanes; `lane` indexes them.
      names: distinct event names; `name` indexes them.
      lane, name: int arrays of shape (events,).
      start, duration: float arrays of shape (events,), seconds.
      communication: bool array of shape (events,): the event occupies a link rather than a compute unit.
      args: further columns of shape (events,): numbers (NaN: not applicable) or strings. The column `flow`
        (int, -1 for none) joins events that are two ends of one message.
      counters: quantities over time.

    Raises ValueError when a column has another length than `start`.
    """

    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    lane: np.ndarray
    name: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    communication: np.ndarray
    args: Mapping[str, np.ndarray] = field(default_factory=dict)
    counters: tuple[Counter, ...] = ()

    def __post_init__(self):
        names = ("lane", "name", "duration", "communication")
        columns = {**{name: getattr(self, name) for name in names}, **self.args}
        for key, column in columns.items():
            if len(column) != len(self.start):
                raise ValueError(f"timeline column {key!r} has {len(column)} entries for {len(self.start)} events")

    @property
    def num_events(self) -> int:
        return len(self.start)

    @property
    def seconds(self) -> float:
        """The end of the last event."""
        return float(np.max(self.start + self.duration, initial=0.0))

    @property
    def device(self) -> np.ndarray:
        """Device of each event, shape (events,)."""
        return np.array([lane.device for lane in self.lanes], dtype=np.int64)[self.lane]


def first_events(timeline: Timeline, limit: int) -> Timeline:
    """The first `limit` events by start time, with the counters until the last of them starts."""
    if timeline.num_events <= limit:
        return timeline
    chosen = np.sort(np.argsort(timeline.start, kind="stable")[:limit])
    until = timeline.start[chosen].max(initial=0.0)
    counters = tuple(
        replace(counter, time=counter.time[shown], value=counter.value[shown])
        for counter in timeline.counters
        for shown in [counter.time <= until]
    )
    return replace(of_events(timeline, chosen), counters=counters)


def of_events(timeline: Timeline, chosen: np.ndarray) -> Timeline:
    """The events `chosen`, by their numbers or as a mask."""
    columns = ("lane", "name", "start", "duration", "communication")
    args = {key: column[chosen] for key, column in timeline.args.items()}
    return replace(timeline, **{name: getattr(timeline, name)[chosen] for name in columns}, args=args)


class Use(NamedTuple):
    """Seconds in which a device computes, uses at least one of its links, and does the latter only."""

    compute: float
    links: float
    exposed: float


def device_use(timeline: Timeline) -> dict[int, Use]:
    """How each device spends its time."""
    device = np.tile(timeline.device, 2)
    time = np.concatenate([timeline.start, timeline.start + timeline.duration])
    delta = np.repeat([1, -1], timeline.num_events)
    communication = np.tile(timeline.communication, 2)
    order = np.lexsort((time, device))
    device, time, delta, communication = device[order], time[order], delta[order], communication[order]
    # Every event ends on its own device, so one cumulative sum over all devices is zero at each boundary.
    compute, links = (np.cumsum(np.where(communication == kind, delta, 0)) > 0 for kind in (False, True))
    gap = np.append(np.diff(time), 0.0)
    gap[np.append(np.diff(device), 1) != 0] = 0.0
    devices, index = np.unique(device, return_inverse=True)
    seconds = [np.bincount(index, gap * where, len(devices)) for where in (compute, links, links & ~compute)]
    return {number: Use(*row) for number, row in zip(devices.tolist(), np.transpose(seconds).tolist())}


def exposed_communication(timeline: Timeline) -> dict[int, float]:
    """Seconds per device in which at least one of its links is in use and it does not compute."""
    return {device: use.exposed for device, use in device_use(timeline).items()}


def _arguments(timeline: Timeline) -> list[dict]:
    rows = [{} for _ in range(timeline.num_events)]
    for key, column in timeline.args.items():
        if key == "flow":
            continue
        numeric = np.issubdtype(column.dtype, np.number)
        for row, value in zip(rows, column.tolist()):
            if not (numeric and value != value):
                row[key] = value
    return rows


def _flows(timeline: Timeline) -> list[dict]:
    flow = timeline.args.get("flow")
    if flow is None:
        return []
    chains: dict[int, list[int]] = {}
    for index in np.flatnonzero(np.asarray(flow) >= 0).tolist():
        chains.setdefault(int(flow[index]), []).append(index)
    events = []
    for key, chain in chains.items():
        if len(chain) == 1:
            continue
        for index, phase in zip(chain, "s" + "t" * (len(chain) - 2) + "f"):
            lane = int(timeline.lane[index])
            event = {"name": "send", "cat": "flow", "ph": phase, "bp": "e", "id": key, "tid": lane}
            event |= {"ts": 1e6 * float(timeline.start[index]), "pid": timeline.lanes[lane].device}
            events.append(event)
    return events


def perfetto(timeline: Timeline) -> dict:
    """The timeline as a trace object for ui.perfetto.dev or chrome://tracing (times in microseconds).

    One process per device, one thread per lane, event arguments, flow arrows between the ends of a message
    and one counter track per `Counter`.
    """
    processes = {lane.device: lane.process for lane in timeline.lanes}
    events = [
        {"name": name, "ph": "M", "pid": device, "args": args}
        for device, process in processes.items()
        for name, args in (("process_name", {"name": process}), ("process_sort_index", {"sort_index": device}))
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": lane.device, "tid": index, "args": {"name": lane.thread}}
        for index, lane in enumerate(timeline.lanes)
    ]
    columns = timeline.name, timeline.lane, timeline.start, timeline.duration, timeline.communication
    events += [
        {
            "name": timeline.names[name], "cat": "communication" if communication else "compute", "ph": "X",
            "ts": 1e6 * start, "dur": 1e6 * duration, "pid": timeline.lanes[lane].device, "tid": lane, "args": args,
        }
        for name, lane, start, duration, communication, args in zip(
            *(column.tolist() for column in columns), _arguments(timeline)
        )
    ]  # fmt: skip
    events += _flows(timeline)
    events += [
        {"name": counter.name, "ph": "C", "pid": counter.device, "ts": 1e6 * time, "args": {counter.name: value}}
        for counter in timeline.counters
        for time, value in zip(counter.time.tolist(), counter.value.tolist())
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(timeline: Timeline, path: str | Path) -> Path:
    """Writes `perfetto(timeline)` as JSON, compressed if `path` ends in `.gz`; returns the path."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps(perfetto(timeline)))  # ten times as fast as json.dump
    return path
