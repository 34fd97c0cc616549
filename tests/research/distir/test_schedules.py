"""Pipeline schedules: complete, possible, and with the memory and idle time their papers promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.parallel.schedules import BACKWARD, FORWARD, WHOLE
from research.distir.schedules import alternating, bubble_fraction, schedule


def in_flight(steps, stage):
    """The largest number of passes that `stage` has run forward and not yet backward."""
    count = peak = 0
    for step in steps:
        for task in step:
            if task.stage == stage:
                count += 1 if task.direction == FORWARD else -1
                peak = max(peak, count)
    return peak


NAMES = st.sampled_from(sorted(("distir", *WHOLE)))
PLANS = st.tuples(NAMES, st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))


@settings(deadline=None, max_examples=120)
@given(PLANS)
def test_every_pass_runs_once_after_what_it_needs(plan):
    name, pipeline, times, per_stage = plan
    chunks = pipeline * (per_stage if name == "interleaved" else 1)
    microbatches = pipeline * times if name == "interleaved" else times
    steps = schedule(name, pipeline, microbatches, chunks)
    when = {task[1:]: number for number, step in enumerate(steps) for task in step}
    assert len(when) == sum(map(len, steps)) == 2 * chunks * microbatches
    for step in steps:
        assert len({task.stage for task in step}) == len(step)
        assert all(task.stage == task.chunk % pipeline for task in step)
    for (chunk, direction, microbatch), number in when.items():
        if direction == FORWARD and chunk:
            assert when[chunk - 1, FORWARD, microbatch] < number
        if direction == BACKWARD:
            assert when[chunk, FORWARD, microbatch] < number
            if chunk + 1 < chunks:
                assert when[chunk + 1, BACKWARD, microbatch] < number


@pytest.mark.parametrize("pipeline,microbatches", [(1, 1), (2, 3), (4, 8), (4, 3), (8, 32)])
def test_microbatches_in_flight(pipeline, microbatches):
    def peaks(name):
        steps = schedule(name, pipeline, microbatches, pipeline)
        return [in_flight(steps, stage) for stage in range(pipeline)]

    assert peaks("gpipe") == [microbatches] * pipeline
    assert peaks("1f1b") == [min(microbatches, pipeline - stage) for stage in range(pipeline)]
    assert peaks("distir") == [min(microbatches, 2 * (pipeline - stage) - 1) for stage in range(pipeline)]


def test_distir_takes_two_steps_per_microbatch_and_stage():
    assert len(schedule("distir", 4, 8, 4)) == 2 * (8 + 4 - 1)
    letters = {
        (task.stage, number): f"{'FB'[task.direction]}{task.microbatch}"
        for number, step in enumerate(schedule("distir", 4, 8, 4))
        for task in step
    }
    row = [letters.get((0, number), "..") for number in range(22)]
    assert " ".join(row) == "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 .. B2 .. B3 .. B4 .. B5 .. B6 .. B7"


def test_more_microbatches_and_interleaving_shrink_the_bubble():
    assert bubble_fraction(schedule("1f1b", 4, 4, 4), 4) == pytest.approx(3 / 7)
    assert bubble_fraction(schedule("1f1b", 4, 16, 4), 4) == pytest.approx(3 / 19)
    assert bubble_fraction(schedule("interleaved", 4, 16, 8), 4) < 0.6 * 3 / 19 + 0.02


def test_forward_only_schedule_runs_every_block():
    steps = alternating((0, 0, 1, 1), 3, backward=False)
    assert sorted(task[1:] for step in steps for task in step) == sorted(
        (block, FORWARD, microbatch) for block in range(4) for microbatch in range(3)
    )


def test_impossible_schedules_say_what_to_change():
    with pytest.raises(ValueError, match="choose one of distir gpipe 1f1b interleaved"):
        schedule("zigzag", 2, 2, 2)
    with pytest.raises(ValueError, match="use schedule=interleaved"):
        schedule("1f1b", 2, 2, 4)
    with pytest.raises(ValueError, match="multiples of the pipeline degree"):
        schedule("interleaved", 2, 3, 4)
