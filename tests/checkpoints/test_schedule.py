"""When to save: by steps and milestones exactly, by time on all processes after the same step."""

import threading

import pytest

from mstrain.checkpoints.config import CheckpointConfig
from mstrain.checkpoints.schedule import Schedule
from mstrain.job.job import ALONE


def test_intervals_milestones_and_the_last_step():
    schedule = Schedule(CheckpointConfig(every=4, keep_every=6), range(3, 15), ALONE)
    assert [step for step in range(3, 15) if schedule(step)] == [4, 6, 8, 12, 14]


def test_a_step_that_is_saved_in_run_dir_is_not_saved_locally_too():
    schedule, local = Schedule(CheckpointConfig(every=4, local_every=2, local_dir="/x"), range(1, 10), ALONE), []
    for step in range(1, 10):
        schedule(step)
        local += [step] if schedule.is_local(step) else []
    assert local == [2, 6]


class Together:
    """`Job.all_gather` for threads."""

    def __init__(self, processes):
        self.questions, self._barrier, self._values = 0, threading.Barrier(processes), [""] * processes

    def of(self, process):
        def all_gather(name, value):
            self._values[process] = value
            self._barrier.wait(10)
            values = [*self._values]
            self.questions += process == 0
            self._barrier.wait(10)
            return values

        return type("Job", (), {"all_gather": staticmethod(all_gather)})


@pytest.mark.parametrize("seconds_per_step", [lambda step: 1.0, lambda step: 1.0 if step < 100 else 1.8])
def test_process_0_decides_by_time_and_few_questions_are_asked(seconds_per_step):
    """The other process's clock runs three times as fast and changes nothing."""
    together, steps, saved = Together(2), range(1, 601), {}

    def run(process):
        now = [0.0]
        config = CheckpointConfig(every=None, minutes=2)
        schedule, made = Schedule(config, steps, together.of(process), lambda: now[0]), saved.setdefault(process, [])
        for step in steps:
            now[0] += seconds_per_step(step) * (1 if process == 0 else 3)
            if schedule(step):
                made.append((step, now[0]))

    threads = [threading.Thread(target=run, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [step for step, _ in saved[0]] == [step for step, _ in saved[1]]
    times = [0, *(time for _, time in saved[0])][:-1]
    assert len(times) > 4 and all(120 <= after - before < 125 for before, after in zip(times, times[1:], strict=False))
    assert together.questions <= 12 * len(saved[0])
