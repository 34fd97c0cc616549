"""The soak, short: three kills over a run of one process and one of two. `python -m tests.soak.soak` is the
long form."""

from tests.soak.soak import MESHES, Kind, Soak


def test_killed_runs_end_as_undisturbed_ones(tmp_path):
    soak = Soak(tmp_path, kills=2, seed=3)
    soak.run(Kind(1, ("2x4",)))
    soak.allow(1)
    soak.run(Kind(2, MESHES))
    assert soak.tally.killed == 3 and soak.tally.attempts == 5 and soak.tally.identical >= 1, soak.tally
