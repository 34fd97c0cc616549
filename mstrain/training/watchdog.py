"""Notices a step that does not end: writes what every thread is doing, and ends the job rather than let it
hang.

A hang stops all processes of a job, as they wait for each other, so each one's watchdog writes its own file.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import statistics
import threading
import time
from pathlib import Path

from mstrain.checks import at_least
from mstrain.job.ending import end
from mstrain.job.exit_codes import RESTART
from mstrain.job.job import Job

LOOK_SECONDS = 1.0
STEPS = 50  # of the rolling median


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """A step is stuck after `factor` medians, at least `least_seconds`; it ends after `limit_seconds`."""

    factor: float = 10.0
    least_seconds: float = 60.0
    limit_seconds: float = 1800.0

    def __post_init__(self):
        at_least("watchdog", self, factor=1, least_seconds=0, limit_seconds=1)


class Watchdog:
    """Called with the metrics of every step: the sign that it ended."""

    def __init__(self, config: WatchdogConfig, directory: Path, job: Job):
        self._config, self._job = config, job
        self._path = directory / "stacks" / f"process-{job.process}.txt"
        self._seconds: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._since, self._step, self._told = time.monotonic(), 0, False
        self._over = threading.Event()

    def __call__(self, step: int, values: dict) -> None:
        self._seconds.append(values["step_seconds"])
        self._since, self._step, self._told = time.monotonic(), step, False

    @contextlib.contextmanager
    def watching(self):
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._path.parent.mkdir(exist_ok=True)
        with open(self._path, "a") as file:
            self._file = file
            self._since = time.monotonic()
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                thread.join()
                with contextlib.suppress(OSError):
                    self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        if not self._path.stat().st_size:
            self._path.unlink()
            self._path.parent.rmdir()  # unless other processes' files are in it

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            # A thread that never gives up the interpreter would stop this one: then the C timer ends it all.
            faulthandler.dump_traceback_later(self._config.limit_seconds + 60, file=self._file, exit=True)
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

    def _bound(self) -> float:
        return max(self._config.least_seconds, self._config.factor * statistics.median(self._seconds))

    def _dump(self, elapsed: float) -> None:
        median = f", the median step {statistics.median(self._seconds):.2f} s" if self._seconds else ""
        text = f"step {self._step + 1} has taken {elapsed:.0f} s{median}"
        self._file.write(f"\n{time.strftime('%F %T')} {text}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._job.say(f"{text}: the stacks of all threads are in {self._path}")
