"""The event loop: causal, exclusive, work-conserving, and in program order on ordered lanes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.kernels import first_come
from mstrain.simulator.program import Ragged
from mstrain.simulator.simulate import simulate
from research.distir.rules import rule_set
from tests.simulator.builder import ProgramBuilder

LANES, ORDERED = 5, 3


@st.composite
def random_events(draw, one_ordered_lane: bool):
    """Operations with lanes, durations and inputs; operation i writes value i."""
    count = draw(st.integers(1, 25))
    lanes, inputs = [], []
    for op in range(count):
        links = st.sets(st.integers(ORDERED, LANES - 1), min_size=1)
        compute = st.integers(0, ORDERED - 1).map(lambda lane: {lane})
        lanes.append(sorted(draw(compute if one_ordered_lane else st.one_of(compute, links))))
        inputs.append(draw(st.lists(st.integers(0, op - 1), max_size=3)) if op else [])
    seconds = [draw(st.integers(0, 5)) for _ in range(count)]
    held = Ragged.of(lanes)
    durations = np.repeat(np.array(seconds, float), held.lengths)
    outputs = Ragged.of([[op] for op in range(count)])
    return (
        lanes,
        inputs,
        np.array(seconds, float),
        (held, durations, Ragged.of(inputs), outputs, LANES, count),
    )


@settings(deadline=None, max_examples=50)
@given(random_events(one_ordered_lane=False))
def test_first_come_is_causal_exclusive_and_never_idles_needlessly(events):
    lanes, inputs, seconds, arguments = events
    starts, ends, free = first_come(*arguments, ORDERED)
    np.testing.assert_array_equal(ends, starts + seconds)
    for lane in range(LANES):
        mine = [op for op, held in enumerate(lanes) if lane in held]
        if lane < ORDERED:
            assert list(starts[mine]) == sorted(starts[mine])
        mine.sort(key=lambda op: (starts[op], ends[op]))
        assert all(ends[a] <= starts[b] for a, b in zip(mine, mine[1:]))
        assert free[lane] == max(ends[mine], default=0.0)
    for op, start in enumerate(starts):
        reasons = [ends[value] for value in inputs[op]]
        reasons += [ends[other] for other in range(len(lanes)) if other != op and set(lanes[other]) & set(lanes[op])]
        assert all(ends[value] <= start for value in inputs[op])
        assert start == 0.0 or start in reasons


@settings(deadline=None, max_examples=60)
@given(random_events(one_ordered_lane=False))
def test_lanes_that_keep_their_order_serve_operations_as_the_program_has_them(events):
    lanes, inputs, seconds, arguments = events
    free, ends = np.zeros(LANES), np.zeros(len(lanes))
    for op, held in enumerate(lanes):
        ends[op] = seconds[op] + max([*free[held], *(ends[value] for value in inputs[op])])
        free[held] = ends[op]
    np.testing.assert_array_equal(first_come(*arguments, LANES)[1], ends)


def test_a_message_that_is_not_ready_does_not_hold_up_one_that_is():
    build, shape = ProgramBuilder(4), (1024, 1024)
    x, w = build.input(shape, 0), build.input(shape, 0)
    (late,) = build.op("MatMul", (shape, shape), (0,), (x, w), [(shape, 0)])
    build.op("Send", (shape,), (0, 1), (late,), [(shape, 1)])
    build.op("Send", (shape,), (0, 1), (x,), [(shape, 1)])
    cluster = Cluster.homogeneous(2, Device(1e12, 1e12), Switch(1e10))
    result = simulate(build.build(), cluster)
    assert result.start[2] == 0.0 and result.start[1] == pytest.approx(2 * 1024**3 / 1e12)
    # DistIR's rendezvous keeps to program order.
    assert simulate(build.build(), cluster, rule_set("head")).start[2] > result.start[1]
