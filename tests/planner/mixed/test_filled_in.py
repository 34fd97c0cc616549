"""The planner reports what it assumes where a profile is missing."""

from types import SimpleNamespace

from mstrain.planner.mixed.times import filled_in


def test_missing_batches_are_named_with_what_is_taken_instead():
    keys = [("A", 1, 1), ("A", 1, 2), ("A", 1, 4), ("B", 1, 2), ("A", 2, 1), ("A", 2, 4)]
    lines = filled_in(dict.fromkeys(keys, SimpleNamespace()))
    assert lines == [
        "profiles missing for A tp 2: batch 2 interpolated",
        "profiles missing for B tp 1: batch 1 taken as long as batch 2, batch 4 not planned",
    ]
    assert filled_in(dict.fromkeys(keys[:3], SimpleNamespace())) == []
