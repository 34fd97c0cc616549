"""Stops a run on SIGTERM, SIGHUP or SIGINT: finishes the step, saves and exits. Preemption notices arrive as SIGTERM.

The first signal requests the stop. A second one has no effect, because some launchers send two. The third ends the
process at once, and so does a second SIGINT (Ctrl-C). Before the first step nothing has to be saved, and the first
signal ends the process. SIGHUP is not handled where it is ignored (nohup).

All processes stop after the same step. A process that receives a signal reports it to process 0 over the links of the
rendezvous. Process 0 requests the current step of all processes. Each one replies and pauses before its next step until
process 0 sends the largest reply, the last step to run. Without a signal nothing is sent; each step acquires one lock.
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
    """Inside, the first signal ends the process with STOPPED, except inside `Preemption.listening`."""
    with _caught(lambda number: _end_now(job, f"{number.name} while no step is running", STOPPED)):
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

    Python signal handlers do not run while the main thread waits for a device. The thread reads signals from the
    interpreter's wakeup pipe instead.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
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
    """Ends the iteration over steps early, after the same step on all processes."""

    def __init__(self, job: Job):
        self._job = job
        self._current = self._stop_after = 0
        self._stopping = False
        self._replies: dict[int, int] = {}
        self._lock = threading.RLock()
        self._step_allowed = threading.Condition()
        self._paused = False
        for kind in ("stop", "where", "at", "stop after"):
            job.on(kind, getattr(self, f"_on_{kind.replace(' ', '_')}"))

    def until_stopped(self, steps: range) -> Iterator[int]:
        """Yields `steps`, up to the last one to run after a signal."""
        for step in steps:
            with self._step_allowed:
                self._step_allowed.wait_for(lambda: not self._paused)
                if self._stopping and step > self._stop_after:
                    return
                self._current = step
            yield step

    def request_stop(self) -> None:
        """Requests all processes to stop; returns at once."""
        if self._job.leads:
            self._on_stop(0, {})
        else:
            self._job.send("stop")

    @contextlib.contextmanager
    def listening(self):
        """Inside, the first signal requests a stop; the third one and the second SIGINT end the process at once."""
        seen: list[signal.Signals] = []

        def act(number: signal.Signals) -> None:
            seen.append(number)
            if len(seen) == 1:
                self.request_stop()
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
        with self._lock:
            if not self._replies:
                self._replies[0] = self._pause()
                self._job.send("where")
                self._decide()

    def _on_where(self, process: int, message: dict) -> None:
        self._job.send("at", process=self._job.process, step=self._pause())

    def _on_at(self, process: int, message: dict) -> None:
        with self._lock:
            self._replies[process] = int(message["step"])
            self._decide()

    def _on_stop_after(self, process: int, message: dict) -> None:
        with self._step_allowed:
            self._stopping, self._stop_after, self._paused = True, int(message["step"]), False
            self._step_allowed.notify()

    def _pause(self) -> int:
        with self._step_allowed:
            self._paused = True
            return self._current

    def _decide(self) -> None:
        if len(self._replies) == self._job.processes:
            step = max(self._replies.values())
            self._job.send("stop after", step=step)
            self._on_stop_after(0, {"step": step})
