"""The secret by which the processes of a job know each other.

It is the environment variable MSTRAIN_JOB_SECRET, which a launcher gives to all of them, or else a file that
process 0 writes in the shared `run_dir`, readable only by its user, and removes when all processes have joined.
The right to read `run_dir` is then the right to join. A file left by an earlier attempt is replaced.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from mstrain.job.ending import cleaned_up

VARIABLE = "MSTRAIN_JOB_SECRET"
FILE = ".job_secret"
SHORTEST = 16  # characters; a shorter one could be guessed from a recorded handshake
REMEDY = f"Start every process with the same {VARIABLE}, such as the output of `openssl rand -hex 32`."


def given_secret() -> bytes | None:
    """The secret of the environment. Raises ValueError when it is too short."""
    text = os.environ.get(VARIABLE, "").strip()
    if text and len(text) < SHORTEST:
        raise ValueError(f"{VARIABLE} has {len(text)} characters, at least {SHORTEST} are needed. {REMEDY}")
    return text.encode() or None


@contextlib.contextmanager
def offered_secret(run_dir: str | Path) -> Iterator[bytes]:
    """Process 0: the secret, which the other processes can read inside this context.

    Raises ValueError when `run_dir` cannot be written.
    """
    if secret := given_secret():
        yield secret
        return
    secret, folder = secrets.token_hex(32).encode(), Path(run_dir).absolute()
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / FILE, secret)
        if (folder / FILE).stat().st_mode & 0o077:
            print(f"The file system of run_dir={run_dir} ignores modes: others may read the job's secret. {REMEDY}")
    except OSError as error:
        raise ValueError(f"Cannot write into run_dir={run_dir} ({error.strerror}). Type another run_dir=.") from None
    with cleaned_up(lambda: _remove(folder, secret, made)):
        yield secret


def read_secret(run_dir: str | Path) -> bytes | None:
    """The secret as it is now, None while there is none. Raises ValueError for a secret that is too short."""
    if secret := given_secret():
        return secret
    try:
        with os.scandir(run_dir):  # opening a folder makes NFS forget that a file was missing
            pass
        # Neither a link nor a named pipe of somebody else is followed or waited for.
        file = os.open(Path(run_dir) / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(file, 1024) or None if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(file)


def _remove(folder: Path, secret: bytes, made: list[Path]) -> None:
    with contextlib.suppress(OSError):
        if read_secret(folder) == secret:  # a job started later may have replaced it
            (folder / FILE).unlink()
        for parent in made:  # a configuration that is refused later leaves no folder behind
            parent.rmdir()


def _write(path: Path, secret: bytes) -> None:
    """Replaces `path` at once, so that no reader sees a part of it."""
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
