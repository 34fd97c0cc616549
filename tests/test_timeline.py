"""Timelines: exposed communication, exports, and what the exported files contain."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.timeline import (
    Counter,
    Lane,
    Timeline,
    device_use,
    exposed_communication,
    perfetto,
    write_perfetto,
)

LANES = tuple(Lane(device, f"chip {device}", thread) for device in (0, 1) for thread in ("compute", "link"))


def make(events, counters=(), **args) -> Timeline:
    """A timeline of (lane, start, duration); odd lanes are links."""
    lane, start, duration = (np.array(column) for column in zip(*events))
    return Timeline(
        LANES,
        ("matmul", "send"),
        lane,
        lane % 2,
        start.astype(float),
        duration.astype(float),
        lane % 2 == 1,
        args,
        counters,
    )


def test_only_link_time_without_computation_is_exposed():
    timeline = make([(0, 0, 4), (1, 3, 4), (1, 8, 1), (2, 0, 2), (3, 0, 2)])
    assert exposed_communication(timeline) == {0: 4.0, 1: 0.0}
    assert device_use(timeline) == {0: (4.0, 5.0, 4.0), 1: (2.0, 2.0, 0.0)}
    assert timeline.seconds == 9.0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=12))
def test_exposed_communication_agrees_with_counting_unit_ticks(events):
    exposed = exposed_communication(make(events))
    for device in exposed:
        ticks = {
            kind: {
                tick
                for lane, start, length in events
                if lane == 2 * device + kind
                for tick in range(start, start + length)
            }
            for kind in (0, 1)
        }
        assert exposed[device] == len(ticks[1] - ticks[0])


def test_perfetto_names_everything_and_keeps_arguments():
    counter = Counter(1, "live memory", np.array([0.0, 1.0]), np.array([8, 16]))
    timeline = make(
        [(0, 0, 1), (1, 1, 2), (3, 1, 2)],
        (counter,),
        flops=np.array([10.0, np.nan, np.nan]),
        flow=np.array([-1, 7, 7]),
    )
    events = perfetto(timeline)["traceEvents"]
    kinds = {phase: [event for event in events if event["ph"] == phase] for phase in "MXCsf"}
    assert {event["args"]["name"] for event in kinds["M"] if event["name"] == "process_name"} == {
        "chip 0",
        "chip 1",
    }
    assert [event["args"]["name"] for event in kinds["M"] if event["name"] == "thread_name"] == [
        "compute",
        "link",
        "compute",
        "link",
    ]
    assert [event["args"] for event in kinds["X"]] == [{"flops": 10.0}, {}, {}]
    assert [event["dur"] for event in kinds["X"]] == [1e6, 2e6, 2e6]
    assert [event["args"] for event in kinds["C"]] == [{"live memory": 8}, {"live memory": 16}]
    assert kinds["s"][0]["pid"] == 0 and kinds["f"][0]["pid"] == 1 and kinds["s"][0]["id"] == kinds["f"][0]["id"]


def test_written_file_is_json_and_compresses(tmp_path):
    timeline = make([(0, 0, 1)])
    plain = json.loads(write_perfetto(timeline, tmp_path / "trace.json").read_text())
    with gzip.open(write_perfetto(timeline, tmp_path / "trace.json.gz"), "rt") as file:
        assert json.load(file) == plain == perfetto(timeline)


def test_columns_of_another_length_are_refused():
    with pytest.raises(ValueError, match="'flops' has 2 entries for 1 events"):
        make([(0, 0, 1)], flops=np.zeros(2))


def test_flows_join_the_hops_of_a_message_and_nothing_else():
    timeline = make([(1, 0, 1), (3, 0, 1), (3, 1, 1), (1, 2, 1)], flow=np.array([4, 4, 4, 9]))
    flows = [event for event in perfetto(timeline)["traceEvents"] if event.get("cat") == "flow"]
    assert [(event["ph"], event["id"], event["pid"]) for event in flows] == [
        ("s", 4, 0),
        ("t", 4, 1),
        ("f", 4, 1),
    ]
