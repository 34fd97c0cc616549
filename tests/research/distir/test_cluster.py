"""Networks and ring collectives: paths, sharing of wires, and the textbook costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.hardware import Link
from mstrain.hardware.link import ring_seconds
from mstrain.simulator.cluster import Switch
from research.distir.rules import mean_bandwidth
from tests.simulator.networks import Pairs, Torus

GB = 1e9


def test_ring_collectives_cost_what_the_textbook_says():
    ring = 4, Link(0.0, 1e-6, 10 * GB)
    assert ring_seconds("AllReduce", 4 * GB, *ring) == pytest.approx(2 * 3 * (1e-6 + 0.1))
    assert ring_seconds("ReduceScatter", 4 * GB, *ring) == pytest.approx(3 * (1e-6 + 0.1))
    assert ring_seconds("AllGather", 1 * GB, *ring) == pytest.approx(3 * (1e-6 + 0.1))
    assert ring_seconds("Broadcast", 4 * GB, *ring) == pytest.approx(3e-6 + 0.4)
    with pytest.raises(ValueError, match="Unknown collective 'Send'"):
        ring_seconds("Send", 1.0, *ring)


@pytest.mark.parametrize("kind", ["AllReduce", "ReduceScatter", "AllGather", "Broadcast"])
def test_nothing_to_do_alone_and_launch_is_paid_once(kind):
    assert ring_seconds(kind, GB, 1, Link(1e-6, 1e-6, GB)) == 0.0
    free, paid = (ring_seconds(kind, GB, 3, Link(launch, 1e-6, GB)) for launch in (0.0, 1e-3))
    assert paid - free == pytest.approx(1e-3)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans(), st.data())
def test_torus_paths_arrive_by_the_shortest_way(shape, wrap, data):
    torus = Torus(tuple(shape), GB, 1e-6, wrap=wrap)
    count = int(np.prod(shape))
    source, destination = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    path = torus.path(source, destination)
    a, b = np.unravel_index(source, shape), np.unravel_index(destination, shape)
    apart = [abs(int(x) - int(y)) for x, y in zip(a, b)]
    assert len(path.wires) == 2 * sum(min(gap, size - gap) if wrap else gap for gap, size in zip(apart, shape))
    here = list(a)
    for wire, other in zip(path.wires[::2], path.wires[1::2]):
        assert wire.device == np.ravel_multi_index(here, shape)
        dim, sign = int(wire.name.split()[2]), wire.name.split()[3]
        here[dim] = (here[dim] + (1 if sign == "+" else -1)) % shape[dim]
        assert other.device == np.ravel_multi_index(here, shape) and other.name.endswith("in")
    assert tuple(here) == tuple(b)


def test_ring_around_a_torus_uses_both_directions_and_a_line_does_not():
    around = Torus((4, 4), 10 * GB)
    assert around.link("AllGather", (0, 1, 2, 3)).bandwidth == 20 * GB
    assert len(around.ring_wires((0, 1, 2, 3))) == 2 * 8
    assert Torus((4, 4), 10 * GB, wrap=False).link("AllGather", (0, 1, 2, 3)).bandwidth == 10 * GB
    assert Torus((8,), 10 * GB).link("AllGather", (0, 1, 2, 3)).bandwidth == 10 * GB
    # Every other device: both hops over each device's wires, still one ring each way.
    assert Torus((8,), 10 * GB).link("AllGather", (0, 2, 4, 6)).bandwidth == 20 * GB


def test_order_of_a_ring_matters_where_wires_are_shared():
    assert (
        Torus((8,), 8 * GB).link("AllGather", (0, 4, 1, 5)).bandwidth
        < Torus((8,), 8 * GB).link("AllGather", (0, 1, 4, 5)).bandwidth
    )


def test_slowest_pair_decides_a_ring_and_the_mean_is_over_all_pairs():
    pairs = Pairs.from_triples(3, [(0, 1, 10.0), (1, 2, 10.0), (0, 2, 1.0)])
    assert pairs.link("AllGather", (0, 1, 2)).bandwidth == 1.0
    assert mean_bandwidth(pairs, (0, 1, 2)) == pytest.approx(7.0)
    assert pairs.path(2, 0).bandwidth == 1.0


def test_equal_pairs_form_the_same_ring_as_a_switch():
    pairs = Pairs(np.full((4, 4), 5.0), 1e-6, 1e-5)
    one, other = pairs.link("AllGather", (0, 2, 3)), Switch(5.0, 1e-6, 1e-5).link("AllGather", (0, 2, 3))
    assert (one.launch, one.sync, one.bandwidth) == pytest.approx((other.launch, other.sync, other.bandwidth))


def test_missing_link_says_what_to_add():
    pairs = Pairs.from_triples(3, [(0, 1, 10.0)])
    for ask in (lambda: pairs.path(1, 2), lambda: mean_bandwidth(pairs, (0, 1, 2))):
        with pytest.raises(ValueError, match=r"add \(\d, 2, bytes_per_second\)"):
            ask()
