"""What the modes share: the run directory, a progress line, and the console."""

import contextlib
import sys
import threading
from pathlib import Path

from rich.console import Console

from mstrain.planner.clock import Clock

PROGRESS_SECONDS = 5.0  # between lines on standard error


def console() -> Console:
    """Standard output; tables that go to a file are not cut to the width of a terminal that is not there."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


def make_folder(path: str) -> Path:
    """Creates `path`, or says on standard error that it holds files; raises ValueError where it cannot be made."""
    if not path.strip():
        raise ValueError("run_dir is empty. Type run_dir=runs/plan, or the name of another folder.")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = any(folder.iterdir())
    except OSError as error:
        raise ValueError(f"run_dir={path}: {error.strerror}. Type the name of a folder that can be written.") from None
    if held:
        text = f"plan: {path} holds files; those of the same names are replaced. To keep them, type another run_dir=."
        print(text, file=sys.stderr)
    return folder


def no_time_to_simulate(max_seconds: float) -> str:
    """Why a plan comes without its simulation."""
    return (
        f"The plan is not simulated: too little of max_seconds={max_seconds:g} is left. Type "
        f"max_seconds={4 * max_seconds:g}, or simulate=False."
    )


@contextlib.contextmanager
def progress(what: str, clock: Clock):
    """Prints to standard error, every few seconds, for how long `what` has run."""
    done = threading.Event()

    def say():
        while not done.wait(PROGRESS_SECONDS):
            spent = clock.seconds + clock.compiled
            print(f"plan: {what}: {spent:.0f} s; limit {clock.budget:g} s after compilation", file=sys.stderr)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
