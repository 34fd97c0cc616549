"""All processes stop after the same step, whoever is signalled and whenever. Threads stand for processes,
queues for links."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.job.exit_codes import STOPPED
from mstrain.job.job import ALONE
from mstrain.job.preemption import Preemption
from mstrain.job.signals import SIGNALS


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
        for step in preemptions[i].until_stopped(range(1, 100_000)):
            time.sleep(lag.uniform(0, 0.002))
            meeting.wait(10)
            made[i] = step

    threads = [threading.Thread(target=run, args=(i,)) for i in range(processes)]
    for thread in threads:
        thread.start()
    time.sleep(when)
    for i in signalled:
        if i < processes:
            preemptions[i].request_stop()
    if not any(i < processes for i in signalled):
        preemptions[0].request_stop()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), made
    assert len(set(made)) == 1, made


def test_nothing_happens_without_a_signal():
    assert [*Preemption(ALONE).until_stopped(range(3, 9))] == [*range(3, 9)]


@pytest.fixture
def hangup():
    """SIGHUP as a login shell leaves it, whatever started the tests (nohup ignores it)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM]]
)
def test_signals_end_the_steps_and_the_handlers_are_put_back(numbers, capsys, hangup):
    before, preemption, made = [signal.getsignal(number) for number in SIGNALS], Preemption(ALONE), []
    with preemption.listening():
        for step in preemption.until_stopped(range(1, 10_000)):
            made.append(step)
            if step == 3:
                for number in numbers:
                    os.kill(os.getpid(), number)
                    time.sleep(0.05)
            time.sleep(0.01)
    assert 3 <= len(made) < 500 and [signal.getsignal(number) for number in SIGNALS] == before
    assert f"{numbers[0].name}: stopping after this step" in capsys.readouterr().out


SIGNALS_TO_ITSELF = """
import os, signal, sys, time
from mstrain.job.ending import cleaned_up
from mstrain.job.job import ALONE
from mstrain.job.preemption import Preemption, ending_on_signals
where, *numbers = sys.argv[1:]
signal.signal(signal.SIGHUP, signal.SIG_IGN if where == "nohup" else signal.SIG_DFL)
listening = Preemption(ALONE).listening() if where == "step" else ending_on_signals(ALONE)
with cleaned_up(lambda: print("cleaned up", flush=True)), listening:
    for number in numbers:
        os.kill(os.getpid(), getattr(signal, number))
        time.sleep(0.1)
    time.sleep(1)
    print("lived", flush=True)
"""


@pytest.mark.parametrize(
    "words, code",
    [
        ("step SIGTERM SIGHUP", 0),
        ("step SIGTERM SIGTERM SIGTERM", 143),
        ("step SIGTERM SIGINT SIGHUP", 129),
        ("step SIGINT SIGINT", 130),
        ("start SIGHUP", STOPPED),
        ("nohup SIGHUP", 0),
    ],
)
def test_the_third_signal_ends_and_so_does_a_second_interrupt_or_one_before_the_first_step(words, code):
    command = [sys.executable, "-c", SIGNALS_TO_ITSELF, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("lived" in done.stdout) == (code == 0) and done.stdout.count("cleaned up") == 1


def test_asked_before_the_first_step_none_is_made():
    preemption = Preemption(ALONE)
    preemption.request_stop()
    assert [*preemption.until_stopped(range(5, 9))] == []
