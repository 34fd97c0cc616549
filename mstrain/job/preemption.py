"""SIGTERM, SIGINT and a platform's notice (which arrives as SIGTERM): finish the step, save, leave.

All processes stop after the same step. The process that got the signal tells process 0 (over the roll call's
links), which asks everyone for the last step begun; each answers and begins no further one until it hears the
answer: the largest. An undisturbed run exchanges nothing, and each step costs it one uncontended lock.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from mstrain.job.job import Job

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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

    def until_told(self, steps: range) -> Iterator[int]:
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
        """Inside, the first SIGTERM or SIGINT asks to stop and the second ends the process at once.

        The interpreter writes signals into a pipe while the main thread waits for a device; a thread reads.
        """
        if threading.current_thread() is not threading.main_thread():  # others may have no signal handlers
            yield
            return
        out, into = os.pipe()
        os.set_blocking(into, False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        wakeup = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(out,), name="signals", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(into)

    def _read(self, pipe: int) -> None:
        asked = False
        while numbers := os.read(pipe, 1):
            if numbers[0] not in SIGNALS:
                continue
            name = signal.Signals(numbers[0]).name
            if asked:
                self._job.say(f"second signal ({name}): ending at once")
                self._job.leave(f"second {name}", 128 + numbers[0])
                os._exit(128 + numbers[0])
            asked = True
            self._job.say(f"{name}: stopping after this step (a second signal ends at once)")
            self.ask()
        os.close(pipe)

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
