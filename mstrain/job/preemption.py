"""SIGTERM, SIGHUP and SIGINT: finish the step, save, leave. A platform's preemption notice arrives as SIGTERM.

The first signal asks for the stop. A second one changes nothing, since some launchers send two; the third ends the
process at once. A second SIGINT (Ctrl-C) ends it, too: it comes from a person. Before the first step there is nothing
to save, and the first signal ends the process. SIGHUP stays ignored where it is (nohup).

All processes stop after the same step. The process that got the signal sends it to process 0 (over the rendezvous's
links), which asks everyone for the last step begun; each answers and begins no further one until it hears the
answer: the largest. An undisturbed run exchanges nothing, and each step costs it one uncontended lock.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from mstrain.job.ending import end
from mstrain.job.exit_codes import SIGNALED, STOPPED
from mstrain.job.job import Job
from mstrain.job.signals import to_handle


@contextlib.contextmanager
def ending_on_signals(job: Job):
    """Inside, where `Preemption.listening` does not apply, the first signal ends the process with STOPPED."""
    with _caught(lambda number: _end_now(job, f"{number.name} while no step is under way", STOPPED)):
        yield


def _end_now(job: Job, reason: str, code: int) -> None:
    try:
        job.log(f"{reason}: ending at once; the same command resumes")
        job.leave(reason, code)
    finally:
        end(code)


@contextlib.contextmanager
def _caught(act: Callable[[signal.Signals], None]):
    """Inside, a thread calls `act` with each signal that arrives.

    The interpreter writes signals into a pipe while the main thread waits for a device; the thread reads it.
    """
    if threading.current_thread() is not threading.main_thread():  # others may have no signal handlers
        yield
        return
    out, into = os.pipe()
    os.set_blocking(into, False)
    caught = to_handle()
    handlers = {number: signal.signal(number, lambda *_: None) for number in caught}
    wakeup = signal.set_wakeup_fd(into, warn_on_full_buffer=False)

    def read():
        while numbers := os.read(out, 1):
            if numbers[0] in caught:
                act(signal.Signals(numbers[0]))
        os.close(out)

    threading.Thread(target=read, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(into)


class Preemption:
    """Ends an iteration over steps early, after a step that all processes agree on."""

    def __init__(self, job: Job):
        self._job = job
        self._begun = self._stop_after = 0
        self._stopping = False
        self._answers: dict[int, int] = {}
        self._deciding = threading.RLock()
        self._may_begin = threading.Condition()
        self._frozen = False
        for kind in ("stop", "where", "at", "stop after"):
            job.on(kind, getattr(self, f"_on_{kind.replace(' ', '_')}"))

    def until_stopped(self, steps: range) -> Iterator[int]:
        """Gives `steps`, fewer when a signal comes."""
        for step in steps:
            with self._may_begin:
                self._may_begin.wait_for(lambda: not self._frozen)
                if self._stopping and step > self._stop_after:
                    return
                self._begun = step
            yield step

    def ask(self) -> None:
        """Asks all processes to stop; returns at once."""
        if self._job.leads:
            self._on_stop(0, {})
        else:
            self._job.send("stop")

    @contextlib.contextmanager
    def listening(self):
        """Inside, the first signal asks to stop; the third, and the second SIGINT, end the process at once."""
        seen: list[signal.Signals] = []

        def act(number: signal.Signals) -> None:
            seen.append(number)
            if len(seen) == 1:
                self.ask()
                self._job.log(
                    f"{number.name}: stopping after this step, which is saved (a second Ctrl-C or a third signal ends "
                    "at once)"
                )
            elif len(seen) > 2 or seen.count(signal.SIGINT) > 1:
                _end_now(self._job, f"{number.name}, signal {len(seen)}", SIGNALED + number)
            else:
                self._job.log(f"{number.name} again: still stopping after this step (one more ends at once)")

        with _caught(act):
            yield

    def _on_stop(self, process: int, message: dict) -> None:
        with self._deciding:
            if not self._answers:
                self._answers[0] = self._freeze()
                self._job.send("where")
                self._decide()

    def _on_where(self, process: int, message: dict) -> None:
        self._job.send("at", process=self._job.process, step=self._freeze())

    def _on_at(self, process: int, message: dict) -> None:
        with self._deciding:
            self._answers[process] = int(message["step"])
            self._decide()

    def _on_stop_after(self, process: int, message: dict) -> None:
        with self._may_begin:
            self._stopping, self._stop_after, self._frozen = True, int(message["step"]), False
            self._may_begin.notify()

    def _freeze(self) -> int:
        with self._may_begin:
            self._frozen = True
            return self._begun

    def _decide(self) -> None:
        if len(self._answers) == self._job.processes:
            step = max(self._answers.values())
            self._job.send("stop after", step=step)
            self._on_stop_after(0, {"step": step})
