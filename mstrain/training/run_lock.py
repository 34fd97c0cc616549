"""Ensures one trainer per run_dir: process 0 holds the lock RUN_DIR/lock for its job."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from mstrain.job.ending import cleaned_up, end
from mstrain.job.exit_codes import CONFIGURATION
from mstrain.job.job import Job
from mstrain.job.lock import STALE_SECONDS, Lock, TakenOver
from mstrain.training.stopped import Stopped

FOLDER = "lock"
WAIT_SECONDS = 2 * STALE_SECONDS  # for process 0, which may wait for the heartbeat of a lost host


@contextlib.contextmanager
def exclusive(run_dir: str, job: Job):
    """Holds the lock of `run_dir`; yields a function that raises Stopped when another trainer has taken it over.

    A new folder without other files is removed at the end.

    Raises:
      ValueError: another trainer holds `run_dir`, or the folder cannot be written.
    """
    if not job.leads:
        job.all_gather(FOLDER, "", WAIT_SECONDS)
        yield lambda: None
        return
    folder = Path(run_dir)
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = Lock(folder / FOLDER, job.log, lambda holder: _end(job, _taken(run_dir, holder)))
    with cleaned_up(lambda: _release(lock, absent)):
        try:
            lock.acquire()
        except BlockingIOError as holder:
            raise ValueError(
                f"Another trainer writes to run_dir={run_dir}: {holder}. Stop it or wait until it ends, or type "
                "another run_dir=."
            ) from None
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"Cannot write into run_dir={run_dir} ({reason}). Type another run_dir=.") from None
        job.all_gather(FOLDER, "", WAIT_SECONDS)
        yield checked(lock, run_dir)


def checked(lock: Lock, run_dir: str) -> Callable[[], None]:
    """A function that raises Stopped when another process has taken over what `lock` held."""

    def check() -> None:
        try:
            lock.check()
        except TakenOver as holder:
            raise Stopped(_taken(run_dir, str(holder)), CONFIGURATION) from None
        except OSError:  # the next save reports a storage failure
            pass

    return check


def _taken(run_dir: str, holder: str) -> str:
    return (
        f"Another trainer has taken run_dir={run_dir} over: {holder}. This one wrote no heartbeat for too long, or its "
        "lock was deleted. It stops without another save"
    )


def _end(job: Job, reason: str) -> None:
    job.log(reason)
    job.leave(reason, CONFIGURATION)
    end(CONFIGURATION)


def _release(lock: Lock, absent: list[Path]) -> None:
    """Releases the lock. Removes the folders that were `absent` before (innermost first) if they have no other
    files."""
    unused = bool(absent) and [path.name for path in absent[0].glob("*")] == [FOLDER]
    lock.release(delete=unused)
    with contextlib.suppress(OSError):
        for path in absent if unused else []:
            path.rmdir()
