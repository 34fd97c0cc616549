"""Standard output and standard error that never stop the process.

Output that cannot be written is counted and dropped: a closed pipe (`| head -1`), a closed terminal, a full disk behind
`> log`, a pager that does not read. Output resumes when writing is possible again.
"""

import atexit
import collections
import io
import os
import select
import sys
from typing import Any

from mstrain.training.best_effort import BestEffort

SECONDS = 1.0  # time limit for writing a line
_writers: dict[str, BestEffort] = {}


def protect() -> None:
    """Replaces sys.stdout and sys.stderr of this process, unless something else has, such as a notebook."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next open file would get this number and all output
            os.open(os.devnull, os.O_RDWR)
        if descriptor and getattr(sys, name) is getattr(sys, f"__{name}__"):
            other = {"stdout": "stderr", "stderr": "stdout"}[name]
            _writers[name] = BestEffort(lambda text, other=other: print(f"train: {text}", file=getattr(sys, other)))
            setattr(sys, name, _stream(descriptor, name, _writers[name]))
            atexit.register(_writers[name].wait)


def failures() -> collections.Counter[str]:
    """Failed writes by stream."""
    return sum((writer.failures for writer in _writers.values()), collections.Counter())


def _stream(descriptor: int, name: str, writer: BestEffort) -> io.TextIOWrapper:
    encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
    buffer: Any = _Descriptor(descriptor, name, writer)  # the stubs want a `name` that TextIOWrapper does not need
    return io.TextIOWrapper(buffer, encoding, errors="replace", line_buffering=True, write_through=True)


class _Descriptor(io.RawIOBase):
    """A file descriptor, written by the thread of `writer`; `flush` waits for at most SECONDS."""

    def __init__(self, descriptor: int, name: str, writer: BestEffort):
        super().__init__()
        self._descriptor, self._name, self._writer = descriptor, name, writer

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data) -> int:
        self._writer.do(self._name, self._write_all, bytes(data))
        return len(data)

    def flush(self) -> None:
        self._writer.wait(SECONDS)

    def close(self) -> None:
        """Standard streams stay open."""

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another program has made the terminal or pipe non-blocking
                select.select([], [self._descriptor], [])
