"""Reads and writes files of a run directory. Writes are atomic, and links are not followed.

Every function raises OSError when the file system fails, and ValueError when the path is not a regular file: a folder,
a link, a pipe, a device.
"""

import collections
import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from mstrain.training.best_effort import BestEffort

KINDS = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: "a file"}  # fmt: skip
WAITING = 10_000  # records kept per file
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a reader must not block


class Appender:
    """Appends records to one file through `observers`. Records that cannot be written are kept for the next attempt.

    `prepare()` runs before the first attempt and before every attempt after a failure.
    """

    def __init__(self, observers: BestEffort, name: str, path: Path, prepare: Callable[[], None]):
        self._observers, self._name, self._path, self._prepare = observers, name, path, prepare
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=WAITING)
        self._ready = False

    def append(self, *records: bytes) -> None:
        """Returns at once. Without records, it retries to write the earlier ones."""
        self._observers.do(self._name, self._write, records)

    def _write(self, records: tuple[bytes, ...]) -> None:
        self._waiting.extend(records)
        if not self._ready:
            self._prepare()
        self._ready = False
        if self._waiting:
            append(self._path, b"".join(self._waiting))
            self._waiting.clear()
        self._ready = True


def append(path: Path, data: bytes) -> None:
    """Appends all of `data`; on failure the file keeps its length."""
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
        length = os.fstat(file).st_size
        try:
            _write(file, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, length)
            raise


def end_line(path: Path) -> None:
    """Ends an incomplete last line, so that lines appended later stay valid."""
    with contextlib.suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as file:
        length = os.fstat(file).st_size
        if length and os.pread(file, 1, length - 1) != b"\n":
            append(path, b"\n")


def replace(path: Path, data: bytes) -> None:
    """Replaces a file by `data` atomically; on failure the old file remains."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            _write(file, data)
        _check_path(path, stat.S_IFREG)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read(path: Path) -> bytes:
    """The content; empty if the file is missing."""
    try:
        with _opened(path, os.O_RDONLY) as file, open(file, "rb", closefd=False) as reader:
            return reader.read()
    except FileNotFoundError:
        return b""


def make_folder(path: Path) -> None:
    """Makes one folder unless it exists; its parent must."""
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    _check_path(path, stat.S_IFDIR)


def _check_path(path: Path, wanted: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path, path.lstat().st_mode, wanted)


def _check_kind(path: Path, mode: int, wanted: int) -> None:
    found = stat.S_IFMT(mode)
    if found != wanted:
        raise ValueError(f"{path} is {KINDS.get(found, 'something else')}, not {KINDS[wanted]}. Remove it.")


@contextlib.contextmanager
def _opened(path: Path, flags: int):
    """The descriptor of a regular file."""
    try:
        file = os.open(path, flags | SAFELY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a pipe without a reader
            _check_path(path, stat.S_IFREG)
        raise
    try:
        _check_kind(path, os.fstat(file).st_mode, stat.S_IFREG)
        yield file
    finally:
        os.close(file)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
