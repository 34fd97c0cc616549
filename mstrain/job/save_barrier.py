"""Barriers during a save that end on all processes when one process fails.

Orbax's own barriers wait for a failed process until their timeout. Here process 0 counts the processes that have
arrived, over the links of the rendezvous, and forwards the first failure.
"""

import sys
import threading

from mstrain.job.job import Job


class SaveBarrier:
    """The barriers of consecutive saves, each started by all processes of `job`."""

    def __init__(self, job: Job):
        self._job, self._save = job, 0
        self._arrived: dict[str, set[int]] = {}
        self._passed: set[str] = set()
        self._failed: dict[int, str] = {}
        self._changed = threading.Condition()
        self._handlers = {"save arrived": self._on_arrived, "save passed": self._on_passed,
                          "save failed": self._on_failed}  # fmt: skip
        for kind, handler in self._handlers.items():
            job.on(kind, handler)

    def begin(self) -> None:
        """Starts the next save. Messages of earlier ones no longer matter."""
        self._save += 1

    def fail(self, reason: str) -> None:
        """Ends all barriers of this save on all processes, including later ones."""
        if self._save not in self._failed:
            text = f"{self._job.name(self._job.process)}: {reason}"
            self._notify("save failed", save=self._save, reason=text[:1000])

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all processes have arrived at barrier `key` of this save.

        Raises OSError with the reason when one of them has failed, TimeoutError after `timeout_ms`.
        """
        save, key = self._save, f"{self._save} {key}"
        if error := sys.exc_info()[1]:  # Orbax reaches its last barrier even while it fails
            self.fail(f"{type(error).__name__}: {error}")
        self._notify("save arrived", key=key, process=self._job.process)
        with self._changed:
            self._changed.wait_for(lambda: key in self._passed or save in self._failed, timeout_ms / 1000)
            if save in self._failed:
                raise OSError(self._failed[save])
            if key not in self._passed:
                raise TimeoutError(f"not every process arrived at {key!r} within {timeout_ms / 1000:.0f} s")
            self._passed.discard(key)

    def _notify(self, kind: str, **values) -> None:
        """Processes send to process 0, which handles its own messages directly."""
        if self._job.leads:
            self._handlers[kind](0, values)
        else:
            self._job.send(kind, **values)

    def _on_arrived(self, _: int, message: dict) -> None:
        key = str(message["key"])
        with self._changed:
            arrived = self._arrived.setdefault(key, set())
            arrived.add(int(message["process"]))
            if len(arrived) < self._job.processes:
                return
            del self._arrived[key]
        self._job.send("save passed", key=key)
        self._on_passed(0, {"key": key})

    def _on_passed(self, _: int, message: dict) -> None:
        with self._changed:
            self._passed.add(str(message["key"]))
            self._changed.notify_all()

    def _on_failed(self, _: int, message: dict) -> None:
        with self._changed:
            self._failed.setdefault(int(message["save"]), str(message["reason"]))
            self._changed.notify_all()
        if self._job.leads:
            self._job.send("save failed", **{name: message[name] for name in ("save", "reason")})
