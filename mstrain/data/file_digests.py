"""Digests of file contents, computed once per machine and file version, and remembered in the cache folder.

A version of a file is its inode, size, modification time and change time. No program can set the change time, so a
write that restores the modification time is noticed too. Times have a resolution: a version that changed within the
last two seconds could change again and keep its times, so its digest is not remembered. Age is the larger of the
age by the file's times and the time since this process first saw the version, because the clock of a file server may
be ahead.
"""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from mstrain.data.documents import text_digest
from mstrain.json_files import replace_text

SETTLED_SECONDS = 2.0  # the coarsest resolution of times, that of FAT


class FileDigests:
    """Digests of the files below one folder. A remembered digest that cannot be read is computed again."""

    def __init__(self, cache: Path, root: Path):
        """`cache` is data.cache_dir. Raises nothing: without a readable cache every digest is computed."""
        name = text_digest(platform.node(), str(root.resolve()))
        self._place = cache / "digests" / f"{name}.json"
        self._known = _read(self._place)
        self._used = {}
        self._first_seen = {}

    def of(self, name: str, stat: Callable[[], os.stat_result], compute: Callable[[], str]) -> str:
        """The digest of the file `name`: the remembered one of the version that `stat` reports, or `compute()`."""
        before = stat()
        found, unsettled = _version(before), self.unsettled_seconds(name, before)
        known = self._known.get(name)
        if isinstance(known, list) and known[:-1] == found and isinstance(known[-1], str):
            self._used[name] = known
            return known[-1]
        digest = compute()
        if not unsettled and _version(stat()) == found:
            self._known[name] = self._used[name] = [*found, digest]
        return digest

    def unsettled_seconds(self, name: str, stat: os.stat_result) -> float:
        """Seconds from now until the version in `stat` is old enough to be remembered; 0 when it is."""
        seen = self._first_seen.setdefault((name, *_version(stat)), time.monotonic())
        age = max(time.time() - stat.st_ctime, time.monotonic() - seen)
        return max(0.0, SETTLED_SECONDS - age)

    def save(self) -> None:
        """Remembers the digests that were used since this was made; forgets those of other names. Best effort."""
        if self._used == _read(self._place):
            return
        with contextlib.suppress(OSError):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._place, json.dumps(self._used))


def _version(stat: os.stat_result) -> list[int]:
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(place: Path) -> dict:
    try:
        known = json.loads(place.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
