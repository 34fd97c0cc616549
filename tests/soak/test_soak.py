"""The soak, short: one kill of a run of one process. `python -m tests.soak.soak` is the long form, of two as well."""

from tests.soak.soak import Kind, Soak


def test_killed_runs_end_as_undisturbed_ones(tmp_path):
    soak = Soak(tmp_path, kills=1, seed=3)
    soak.run(Kind(1, ("1x1",)))
    assert soak.tally.killed == 1 and soak.tally.attempts == 2 and soak.tally.identical == 1, soak.tally
