"""Ends the process from any thread, even while the main thread is blocked, after running cleanups."""

import contextlib
import os
import threading
import typing
from collections.abc import Callable

CLEANUP_SECONDS = 5  # storage that hangs must not prevent the exit

_cleanups: list[Callable[[], None]] = []


@contextlib.contextmanager
def cleaned_up(cleanup: Callable[[], None]):
    """Calls `cleanup` once at the end of the block, or before `end` ends the process inside it."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)
        cleanup()


def end(code: int) -> typing.NoReturn:
    """Ends the process with `code`. Never returns, raises or waits longer than CLEANUP_SECONDS."""
    with contextlib.suppress(RuntimeError):  # no threads while the interpreter shuts down
        thread = threading.Thread(target=_clean_up, name="cleanup", daemon=True)
        thread.start()
        thread.join(CLEANUP_SECONDS)
    os._exit(code)


def _clean_up() -> None:
    for cleanup in reversed(_cleanups):
        with contextlib.suppress(Exception):
            cleanup()
