"""Notices a step that does not end: writes what every thread is doing, and ends the job rather than let it
hang.

A hang stops all processes of a job, as they wait for each other, so each one's watchdog writes its own file.
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

LOOK_SECONDS = 1.0
BUSY_SECONDS = 60.0  # beyond the limit, for a thread that never gives up the interpreter
STDERR = 2
STEPS = 50  # of the rolling median


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """What happens when a step hangs: stacks of all threads are written, then the process ends."""

    factor: float = 10.0
    """A step is stuck after this many median step times."""
    least_seconds: float = 60.0
    """Least seconds before a step counts as stuck."""
    limit_seconds: float = 1800.0
    """Seconds after which a stuck step ends the process with code 75."""

    def __post_init__(self):
        at_least("watchdog", self, factor=1, least_seconds=0, limit_seconds=1)


class Watchdog:
    """Called with the metrics of every step: the sign that it ended."""

    def __init__(self, config: WatchdogConfig, directory: Path, job: Job, observers: BestEffort):
        self._config, self._job, self._observers = config, job, observers
        self._path = directory / "stacks" / f"process-{job.process}.txt"
        self._seconds: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._since, self._step, self._told = time.monotonic(), 0, False
        self._over = threading.Event()

    def __call__(self, step: int, values: dict) -> None:
        self._seconds.append(values["step_seconds"])
        self._since, self._step, self._told = time.monotonic(), step, False

    @contextlib.contextmanager
    def watching(self):
        """Inside, a thread looks at the time since the last step."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._since = time.monotonic()
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            # A thread that never gives up the interpreter would stop this one: then faulthandler's C thread writes the
            # stacks, and SIGALRM, which nothing handles, ends the process with a code that is restarted.
            busy = self._config.limit_seconds + BUSY_SECONDS
            faulthandler.dump_traceback_later(busy, file=STDERR)
            signal.setitimer(signal.ITIMER_REAL, busy + LOOK_SECONDS)
            elapsed = time.monotonic() - self._since
            if elapsed > self._config.limit_seconds:
                self._dump(elapsed)
                limit = f"watchdog.limit_seconds={self._config.limit_seconds:.0f}"
                reason = f"step {self._step + 1} did not end within {limit}"
                self._job.say(f"{reason}; ending")
                self._job.leave(reason, RESTART)
                end(RESTART)
            if not self._told and len(self._seconds) >= 3 and elapsed > self._bound():
                self._told = True
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
        self._job.say(f"{text}: the stacks of all threads are in {place}")

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
