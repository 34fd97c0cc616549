"""The open descriptors of a process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def descriptors(pid: int | str = "self") -> Iterator[str]:
    """What each refers to, such as a path or `socket:[12]`; the process may close any of them meanwhile."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(entry)
