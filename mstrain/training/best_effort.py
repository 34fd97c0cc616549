"""Runs observers so that they never stop training: logs, plots, traces and console output are best effort.

An observer passes its actions to a `BestEffort`, which runs them in order in a daemon thread. An action that raises is
counted under the observer's name, with one warning per name. An action that blocks, for example on a file system that
does not respond, delays only the actions after it. When too many are queued, further ones are dropped and counted.
"""

import collections
import threading
from collections.abc import Callable
from typing import Any

WAITING = 10_000  # queued actions
SECONDS = 10.0  # time limit for an action whose result is needed, and for all of them at the end


class BestEffort:
    """Runs actions that may fail. `warn(text)` is called once per name, from any thread, and must not raise.

    Attributes:
      failures: the number of failed, dropped and overdue actions by name.
    """

    def __init__(self, warn: Callable[[str], None]):
        self.failures: collections.Counter[str] = collections.Counter()
        self._warn = warn
        self._actions: collections.deque = collections.deque()
        self._changed = threading.Condition()
        self._given = self._finished = 0
        self._overdue = False  # the last wait timed out, and nothing has finished since
        self._thread: threading.Thread | None = None

    def do(self, name: str, action: Callable, *args) -> bool:
        """Runs `action(*args)` soon; returns at once. False when too many are queued and this one is dropped."""
        with self._changed:
            full = len(self._actions) >= WAITING
            if not full:
                self._actions.append((name, action, args))
                self._given += 1
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="best effort", daemon=True)
                self._thread.start()
        if full:
            self.fail(name, f"{WAITING} earlier actions are not finished")
        return not full

    def attempt(self, name: str, action: Callable, *args, default: Any = None, seconds: float = SECONDS) -> Any:
        """The result of `action(*args)`; `default` when it raises, or has not returned after `seconds`."""
        results = []
        if self.do(name, lambda: results.append(action(*args))) and not self.wait(seconds) and not results:
            self.fail(name, f"no result within {seconds:.0f} s")
        return results[0] if results else default

    def wait(self, seconds: float = SECONDS) -> bool:
        """Whether every action given so far has finished within `seconds`.

        After a wait that timed out, further ones return at once until an action finishes.
        """
        with self._changed:
            given = self._given
            limit = 0 if self._overdue else seconds
            finished = self._changed.wait_for(lambda: self._finished >= given, limit)
            self._overdue = not finished
            return finished

    def fail(self, name: str, reason: str) -> None:
        """Counts a failure of the observer `name`; the first one is a warning."""
        self.failures[name] += 1
        if self.failures[name] == 1:
            self._warn(f"{name}: {reason}. Training continues; further failures of {name} are only counted.")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._overdue = False
        self.wait()
        with self._changed:
            self._actions.append(None)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._actions)
                task = self._actions.popleft()
            if task is None:
                return
            name, action, args = task
            try:
                action(*args)
            except Exception as error:  # an observer's library may raise any type
                self.fail(name, getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
            finally:
                with self._changed:
                    self._finished += 1
                    self._overdue = False
                    self._changed.notify_all()
