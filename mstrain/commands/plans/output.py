"""What the modes share: the run directory, a progress line, and the console."""

import contextlib
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

PROGRESS_SECONDS = 5.0  # between lines on standard error


def console() -> Console:
    """Standard output; tables that go to a file are not cut to the width of a terminal that is not there."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


def make_folder(path: str) -> Path:
    """Creates `path`; raises ValueError where that cannot be."""
    if not path.strip():
        raise ValueError("run_dir is empty. Type run_dir=runs/plan, or the name of another folder.")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir={path}: {error.strerror}. Type the name of a folder that can be written.") from None
    return folder


@contextlib.contextmanager
def progress(what: str, budget: float):
    """Says on standard error every few seconds how much of `budget` (seconds) `what` has used."""
    done, began = threading.Event(), time.monotonic()

    def say():
        while not done.wait(PROGRESS_SECONDS):
            print(f"plan: {what}: {time.monotonic() - began:.0f} s of at most {budget:g} s", file=sys.stderr)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
