"""Barriers during a save that the failure of one process breaks for all.

By itself Orbax lets the other processes of a save wait, until its time is up, for the one that has failed.
Here process 0 counts who has come, over the links of the rendezvous, and passes on the first failure.
"""

import sys
import threading

from mstrain.job.job import Job


class SaveBarrier:
    """Of all processes of `job` on one save after the other, each begun by all of them."""

    def __init__(self, job: Job):
        self._job, self._save = job, 0
        self._came: dict[str, set[int]] = {}
        self._passed: set[str] = set()
        self._failed: dict[int, str] = {}
        self._changed = threading.Condition()
        self._handlers = {"save came": self._on_came, "save passed": self._on_passed,
                          "save failed": self._on_failed}  # fmt: skip
        for kind, handler in self._handlers.items():
            job.on(kind, handler)

    def begin(self) -> None:
        """The next save; what was said of earlier ones no longer matters."""
        self._save += 1

    def fail(self, reason: str) -> None:
        """Breaks the barriers of this save everywhere, those not yet reached, too."""
        if self._save not in self._failed:
            text = f"{self._job.name(self._job.process)}: {reason}"
            self._ask("save failed", save=self._save, reason=text[:1000])

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all processes have come to barrier `key` of this save.

        Raises OSError with the reason when one of them has failed, TimeoutError after `timeout_ms`.
        """
        save, key = self._save, f"{self._save} {key}"
        if error := sys.exc_info()[1]:  # Orbax comes to its last barrier even while it fails
            self.fail(f"{type(error).__name__}: {error}")
        self._ask("save came", key=key, process=self._job.process)
        with self._changed:
            self._changed.wait_for(lambda: key in self._passed or save in self._failed, timeout_ms / 1000)
            if save in self._failed:
                raise OSError(self._failed[save])
            if key not in self._passed:
                raise TimeoutError(f"not every process came to {key!r} within {timeout_ms / 1000:.0f} s")
            self._passed.discard(key)

    def _ask(self, kind: str, **values) -> None:
        """Process 0 decides what the others ask of it."""
        if self._job.leads:
            self._handlers[kind](0, values)
        else:
            self._job.send(kind, **values)

    def _on_came(self, _: int, message: dict) -> None:
        key = str(message["key"])
        with self._changed:
            came = self._came.setdefault(key, set())
            came.add(int(message["process"]))
            if len(came) < self._job.processes:
                return
            del self._came[key]
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
