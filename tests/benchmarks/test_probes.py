"""Rounds of measurements end in time, and a machine that cannot finish one is reported."""

import itertools
import math
import time

import pytest

from mstrain.benchmarks.probes import Probe, run_rounds


def test_rounds_stop_at_the_limit_but_not_before_one_is_used(monkeypatch):
    runs = []
    probes = [Probe((name,), 1, lambda name=name: runs.append(name)) for name in "ab"]
    times = run_rounds(probes, 3, math.inf)
    assert runs == ["a", "b"] * 4 and times.counted.keys() == times.wall.keys() == {("a",), ("b",)}
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    runs.clear()
    run_rounds(probes, 3, end=4)  # a warm-up, one round, and half of the next
    assert runs == [*"ababa"]
    with pytest.raises(ValueError, match="too busy"):
        run_rounds(probes, 3, end=6)
