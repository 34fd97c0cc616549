"""Detects a step that hangs: writes the stacks of all threads, and ends the process after a time limit.

A hang stops all processes of a job, because they wait for each other. Each process writes its own file.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import signal
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

from mstrain.checks import at_least
from mstrain.job.ending import end
from mstrain.job.exit_codes import RESTART
from mstrain.job.job import Job
from mstrain.training import files
from mstrain.training.best_effort import BestEffort

CHECK_SECONDS = 1.0
BUSY_SECONDS = 60.0  # beyond the limit, for a thread that never releases the GIL
STDERR = 2
STEPS = 50  # of the rolling median


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """Limits for a step that hangs. First the stacks of all threads are written, then the process ends."""

    factor: float = 10.0
    """Multiple of the median step time after which a step counts as stuck and stack traces are written."""
    least_seconds: float = 60.0
    """Minimum seconds before a step counts as stuck."""
    limit_seconds: float = 1800.0
    """Seconds after which a stuck step ends the process with exit code 75."""

    def __post_init__(self):
        at_least("watchdog", self, factor=1, least_seconds=0, limit_seconds=1)


class Watchdog:
    """An observer: called with the metrics of every step, which show that it has ended."""

    def __init__(self, config: WatchdogConfig, directory: Path, job: Job, observers: BestEffort):
        self._config, self._job, self._observers = config, job, observers
        self._path = directory / "stacks" / f"process-{job.process}.txt"
        self._seconds: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._since, self._step, self._reported = time.monotonic(), 0, False
        self._over = threading.Event()

    def __call__(self, step: int, values: dict) -> None:
        self._seconds.append(values["step_seconds"])
        self._since, self._step, self._reported = time.monotonic(), step, False

    @contextlib.contextmanager
    def watching(self):
        """Inside, a thread checks the time since the last step."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._since = time.monotonic()
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(CHECK_SECONDS):
            # A thread that never releases the GIL blocks this one. Then faulthandler's C thread writes the stacks, and
            # SIGALRM, which has no handler, ends the process with an exit code that launchers restart.
            busy = self._config.limit_seconds + BUSY_SECONDS
            faulthandler.dump_traceback_later(busy, file=STDERR)
            signal.setitimer(signal.ITIMER_REAL, busy + CHECK_SECONDS)
            elapsed = time.monotonic() - self._since
            if elapsed > self._config.limit_seconds:
                self._dump(elapsed)
                limit = f"watchdog.limit_seconds={self._config.limit_seconds:.0f}"
                reason = f"step {self._step + 1} did not end within {limit}"
                self._job.log(f"{reason}; ending")
                self._job.leave(reason, RESTART)
                end(RESTART)
            if not self._reported and len(self._seconds) >= 3 and elapsed > self._bound():
                self._reported = True
                self._dump(elapsed)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _bound(self) -> float:
        return max(self._config.least_seconds, self._config.factor * statistics.median(self._seconds))

    def _dump(self, elapsed: float) -> None:
        """Writes the stacks of all threads into the run directory; to standard error when it cannot be written."""
        median = f", the median step {statistics.median(self._seconds):.2f} s" if self._seconds else ""
        text = f"step {self._step + 1} has taken {elapsed:.0f} s{median}"
        stacks = f"\n{time.strftime('%F %T')} {text}\n{_stacks()}"
        place = self._observers.attempt("stacks", self._write, stacks)
        if place is None:
            place = "standard error"
            with contextlib.suppress(OSError):
                print(stacks, file=sys.stderr, flush=True)
        self._job.log(f"{text}: the stacks of all threads are in {place}")

    def _write(self, stacks: str) -> Path:
        files.make_folder(self._path.parent)
        files.append(self._path, stacks.encode(errors="replace"))
        return self._path


def _stacks() -> str:
    """The Python stack of every thread, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
