"""The secret with which the processes of a job authenticate each other.

It is the environment variable MSTRAIN_JOB_SECRET, which a launcher sets for all of them, or else a file that process 0
writes in the shared `run_dir`, readable only by its user, and removes when all processes have joined. Every process
that can read `run_dir` can then join. The file is named after the coordinator, so that a second job that is started in
the same `run_dir` by mistake does not replace the secret of the first. A file left by an earlier attempt is replaced.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from mstrain.job.ending import cleaned_up

VARIABLE = "MSTRAIN_JOB_SECRET"
SHORTEST = 16  # characters; a shorter one could be guessed from a recorded handshake
REMEDY = f"Start every process with the same {VARIABLE}, such as the output of `openssl rand -hex 32`."


def given_secret() -> bytes | None:
    """The secret of the environment. Raises ValueError when it is too short."""
    text = os.environ.get(VARIABLE, "").strip()
    if text and len(text) < SHORTEST:
        raise ValueError(f"{VARIABLE} has {len(text)} characters, at least {SHORTEST} are needed. {REMEDY}")
    return text.encode() or None


def new_secret() -> bytes:
    """The secret of the environment, or else a random one. Raises ValueError as `given_secret`."""
    return given_secret() or secrets.token_hex(32).encode()


def secret_file(run_dir: str | Path, coordinator: str) -> Path:
    """The file with the secret of the job that meets at `coordinator`."""
    return Path(run_dir) / f".job_secret.{re.sub(r'[^0-9A-Za-z.-]', '_', coordinator)[:200]}"


@contextlib.contextmanager
def offered_secret(run_dir: str | Path, coordinator: str, secret: bytes) -> Iterator[None]:
    """Process 0: inside, the other processes can read `secret`.

    Raises ValueError when `run_dir` cannot be written.
    """
    if given_secret():
        yield
        return
    folder = Path(run_dir).absolute()
    path = secret_file(folder, coordinator)
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, secret)
        if path.stat().st_mode & 0o077:
            print(f"The file system of run_dir={run_dir} ignores modes: others may read the job's secret. {REMEDY}")
    except OSError as error:
        raise ValueError(f"Cannot write into run_dir={run_dir} ({error.strerror}). Type another run_dir=.") from None
    with cleaned_up(lambda: _remove(path, secret, made)):
        yield


def read_secret(run_dir: str | Path, coordinator: str) -> bytes | None:
    """The secret, None until it is written. Raises ValueError as `given_secret`."""
    return given_secret() or _read(secret_file(run_dir, coordinator))


def _read(path: Path) -> bytes | None:
    try:
        with os.scandir(path.parent):  # opening the folder makes NFS look for the file again
            pass
        # Does not follow links and does not wait for named pipes of other users.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(file, 1024) or None if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(file)


def _remove(path: Path, secret: bytes, made: list[Path]) -> None:
    with contextlib.suppress(OSError):
        if _read(path) == secret:  # a job started later may have replaced it
            path.unlink()
        for parent in made:  # an invalid configuration must not leave a folder behind
            parent.rmdir()


def _write(path: Path, secret: bytes) -> None:
    """Replaces `path` atomically."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, secret)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
