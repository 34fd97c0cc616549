"""All processes stop after the same step, whoever is signalled and whenever. Threads stand for processes,
queues for links."""

import os
import random
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.job.job import ALONE
from mstrain.job.preemption import Preemption


class Wire:
    """Jobs of `processes` in one process; every message is delivered by a thread after a random while, in
    order."""

    def __init__(self, processes: int, seed: int):
        self.jobs = [Fake(self, i, processes) for i in range(processes)]
        self._random, self._clocks, self._sending = random.Random(seed), {}, threading.Lock()

    def deliver(self, sender: int, to: int, kind: str, values: dict) -> None:
        delay = self._random.uniform(0, 0.004)

        def act(previous):
            if previous:
                previous.join()
            time.sleep(delay)
            self.jobs[to].handlers[kind](sender, values)

        with self._sending:  # two threads of one process may send at once
            thread = threading.Thread(target=act, args=(self._clocks.get((sender, to)),), daemon=True)
            thread.start()
            self._clocks[sender, to] = thread


class Fake:
    def __init__(self, wire, process, processes):
        self.process, self.processes, self.leads, self.handlers, self._wire = (
            process,
            processes,
            process == 0,
            {},
            wire,
        )

    def on(self, kind, handler):
        self.handlers[kind] = handler

    def send(self, kind, **values):
        for to in range(1, self.processes) if self.leads else [0]:
            self._wire.deliver(self.process, to, kind, {"kind": kind, **values})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6), st.floats(0, 0.03), st.sets(st.integers(0, 4), min_size=1))
def test_everyone_makes_the_same_steps(processes, seed, when, signalled):
    wire = Wire(processes, seed)
    preemptions = [Preemption(job) for job in wire.jobs]
    lag = random.Random(seed)
    made = [0] * processes
    # A step is a collective: nobody ends it before everybody has begun it.
    meeting = threading.Barrier(processes)

    def run(i):
        for step in preemptions[i].until_told(range(1, 100_000)):
            time.sleep(lag.uniform(0, 0.002))
            meeting.wait(10)
            made[i] = step

    threads = [threading.Thread(target=run, args=(i,)) for i in range(processes)]
    for thread in threads:
        thread.start()
    time.sleep(when)
    for i in signalled:
        if i < processes:
            preemptions[i].ask()
    if not any(i < processes for i in signalled):
        preemptions[0].ask()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), made
    assert len(set(made)) == 1, made


def test_nothing_happens_without_a_signal():
    assert [*Preemption(ALONE).until_told(range(3, 9))] == [*range(3, 9)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_steps_and_the_handlers_are_put_back(number, capsys):
    before, preemption, made = signal.getsignal(number), Preemption(ALONE), []
    with preemption.listening():
        for step in preemption.until_told(range(1, 10_000)):
            made.append(step)
            if step == 3:
                os.kill(os.getpid(), number)
            time.sleep(0.01)
    assert 3 <= len(made) < 500 and signal.getsignal(number) == before
    assert f"{number.name}: stopping after this step" in capsys.readouterr().out


def test_asked_before_the_first_step_none_is_made():
    preemption = Preemption(ALONE)
    preemption.ask()
    assert [*preemption.until_told(range(5, 9))] == []
