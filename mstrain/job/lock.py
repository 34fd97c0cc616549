"""An exclusive lock of a folder on storage that all hosts share.

FOLDER/N.json is the record of the N-th holder. The record with the highest number is valid. A process acquires the lock
by creating record N + 1 exclusively (O_CREAT | O_EXCL, which is atomic across hosts on NFS 3 and later and on gcsfuse),
and only when record N is released or its holder is dead. Only one of several processes can create it. Numbers only
increase: a process that acts on an old record finds a higher number and retries. A holder that was wrongly considered
dead finds its record removed and must stop. flock and fcntl are not used, because network storage often ignores them.

A holder on this machine is dead when no process has its id and start time. A holder on another machine is dead when its
heartbeat does not change for STALE_SECONDS while this process watches; clocks are not compared. An earlier attempt of
the same SLURM job is dead, because SLURM starts an attempt only after the previous one has ended.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mstrain.job.lock_record import Holder, Record, runs

BEAT_SECONDS = 5.0
STALE_SECONDS = 45.0
POLL_SECONDS = 0.5


class TakenOver(Exception):
    """Another process holds the folder now; the message names it."""


class Lock:
    """Holds `folder` from `acquire` to `release`.

    Args:
      folder: created, with its parents, when it is absent.
      log: called with a message before a wait.
      lost: called with a message, from a thread, when another process has taken the folder over.
      beat_seconds, stale_seconds: between heartbeats, and after which an unchanged one counts as dead.
    """

    def __init__(
        self, folder: Path, log: Callable[[str], None], lost: Callable[[str], None] = lambda _: None,
        beat_seconds: float = BEAT_SECONDS, stale_seconds: float = STALE_SECONDS,
    ):  # fmt: skip
        self._folder, self._log, self._lost = folder, log, lost
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._me = Holder.of_this_process(folder)
        self._number = self._beats = 0
        self._over, self._writing = threading.Event(), threading.Lock()

    def acquire(self) -> None:
        """Returns when this process holds the folder.

        Raises BlockingIOError, which names the holder, when that one is alive, OSError when the folder cannot be
        written.
        """
        heartbeat = _Heartbeat(self._stale_seconds, self._announce_wait)
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = max(self._numbers(), default=0)
            record = Record.read(self._path(number)) if number else Record(b"", released=True)
            alive = self._alive(number, record, heartbeat) if record else None
            if record and alive:
                raise BlockingIOError(str(record.holder))
            if alive is False and self._create(number + 1):
                threading.Thread(target=self._beat, name="lock", daemon=True).start()
                return
            time.sleep(min(POLL_SECONDS, self._beat_seconds))

    def check(self) -> None:
        """Raises TakenOver when this process has lost the folder. Writes deleted records again."""
        while not self._holds(self._number):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._create(self._number)

    def release(self, delete: bool = False) -> None:
        """Releases the lock, and deletes its files with `delete`. Does nothing unless this process holds the folder."""
        self._over.set()
        self._writing.acquire(timeout=self._beat_seconds)  # the heartbeat may wait for storage that hangs
        number, self._number = self._number, 0
        with contextlib.suppress(OSError, TakenOver):
            if number and self._holds(number):
                if delete:
                    self._path(number).unlink()
                    self._folder.rmdir()
                else:
                    self._write(number, released=True)

    def _alive(self, number: int, record: Record, heartbeat: "_Heartbeat") -> bool | None:
        """Whether the holder in `record` is alive; None while that is not known."""
        holder, me = record.holder, self._me
        if record.released or (holder and holder.job == me.job != "" and holder.attempt < me.attempt):
            return False
        if holder and holder.machine == me.machine != "":
            return runs(holder) and not self._is_copied(number, holder)
        return heartbeat(record)

    def _is_copied(self, number: int, holder: Holder) -> bool:
        """Whether `holder` holds another folder, of which this one is a copy."""
        here, there = self._path(number), Path(holder.path) / f"{number}.json"
        try:
            if not there.is_file() or there.samefile(here):
                return False
            original = Record.read(there)
            return original is not None and original.holder == holder
        except OSError:
            return False

    def _announce_wait(self, holder: Holder | None) -> None:
        self._log(
            f"{self._folder.parent} was held by {holder or 'an unknown process'}: waiting up to "
            f"{self._stale_seconds:.0f} s for a heartbeat"
        )

    def _holds(self, number: int) -> bool:
        """Whether the record of this process exists; False if no process has one.

        Raises TakenOver when there is only another one.
        """
        record = Record.read(self._path(number))
        if record and (record.holder is None or record.holder.token == self._me.token):
            return True
        if numbers := self._numbers():
            other = Record.read(self._path(max(numbers)))
            raise TakenOver(str(other.holder if other and other.holder else "another process"))
        return False

    def _create(self, number: int) -> bool:
        """Writes record `number` of this process, unless another process has written that or a higher one."""
        try:
            file = os.open(self._path(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(file, self._me.content(self._beats))
            os.fsync(file)
        except OSError:
            self._path(number).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        numbers = self._numbers()
        if max(numbers, default=number) > number:
            self._path(number).unlink(missing_ok=True)
            return False
        self._number = number
        for old in numbers - {number}:
            self._path(old).unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        while not self._over.wait(self._beat_seconds):
            try:
                with self._writing:
                    if self._over.is_set() or not self._holds(self._number):
                        continue
                    self._beats += 1
                    self._write(self._number)
            except TakenOver as taken:
                self._lost(str(taken))
                return
            except OSError:  # a storage failure may lose the lock but must not stop the run
                continue

    def _write(self, number: int, released: bool = False) -> None:
        """Writes the record in place. Its length is constant, so this also works on a full disk."""
        with open(self._path(number), "r+b", buffering=0) as file:
            file.write(self._me.content(self._beats, released))
            os.fsync(file.fileno())

    def _numbers(self) -> set[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return set()
        return {int(match[1]) for name in names if (match := re.fullmatch(r"(\d{1,18})\.json", name))}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"


class _Heartbeat:
    """Watches the heartbeat of a holder on another machine."""

    def __init__(self, stale_seconds: float, announce: Callable[[Holder | None], None]):
        self._stale_seconds, self._announce = stale_seconds, announce
        self._last: Record | None = None
        self._since = 0.0

    def __call__(self, record: Record) -> bool | None:
        """True when the heartbeat changes, False when it is stale, None while that is not known."""
        last, self._last = self._last, record
        if last and record.raw == last.raw:
            return False if time.monotonic() - self._since >= self._stale_seconds else None
        if last and record.holder and record.holder == last.holder:
            return True
        self._since = time.monotonic()
        self._announce(record.holder)
        return None
