"""Traces as DistIR writes them: a bare array of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mstrain.timeline import Timeline


def chrome_events(timeline: Timeline, rename: Mapping[str, str] | None = None) -> list[dict]:
    """The bare event array of DistIR's simulator: name, ph, ts, dur (seconds), pid 0, tid = device."""
    rename = rename or {}
    names = [rename.get(name, name) for name in timeline.names]
    columns = zip(timeline.name.tolist(), timeline.start.tolist(), timeline.duration.tolist(), timeline.device.tolist())
    return [
        {"name": names[name], "ph": "X", "ts": start, "dur": duration, "pid": 0, "tid": device}
        for name, start, duration, device in columns
    ]


def write_chrome_events(timeline: Timeline, path: str | Path, rename: Mapping[str, str] | None = None) -> Path:
    """Write `chrome_events` as a bare JSON array in microseconds, as DistIR does; return the path."""
    events = chrome_events(timeline, rename)
    Path(path).write_text(
        json.dumps([{**event, "ts": 1e6 * event["ts"], "dur": 1e6 * event["dur"]} for event in events])
    )
    return Path(path)
