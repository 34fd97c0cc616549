"""Compares the tokens of a corpus with the digests in its headers, once per machine and version of the files."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from mstrain.data.file_digests import FileDigests
from mstrain.data.token_file import DamagedTokens, TokenFile

AT_ONCE_BYTES = 1 << 30
"""Up to this size, all files together, tokens are verified before `prepare` returns: about 2 s."""


class Verification:
    """Verifies large files in a background thread from construction on, smaller ones when `wait` is called.

    `wait` is called before a checkpoint is saved or relied on. It compares again when the times of a file have changed.
    Files that are not `ours` are never removed.
    """

    def __init__(self, files: Iterable[TokenFile], cache: Path, ours: bool = True):
        given = tuple(files)
        self._files, self._ours = (*given, *(file.marks for file in given if file.marks)), ours
        self._directory = self._files[0].path.parent
        self._digests = FileDigests(cache, self._directory)
        self._error: DamagedTokens | None = None
        self._thread: threading.Thread | None = None
        if sum(file.num_tokens * file.dtype.itemsize for file in self._files) > AT_ONCE_BYTES:
            self._thread = threading.Thread(target=self._in_background, name="verify tokens", daemon=True)
            self._thread.start()

    @property
    def in_background(self) -> bool:
        return self._thread is not None

    def wait(self) -> None:
        """Returns when every token has been compared.

        Raises DamagedTokens, which names the file, when the tokens do not match the digest. Such a corpus is removed,
        so that the next `prepare` tokenizes its text again.
        """
        if self._thread is not None:
            self._thread.join()
        self._verify()
        if self._error is not None:
            raise DamagedTokens(str(self._error))

    def _in_background(self) -> None:
        # The digest of a file just written is not remembered: without this pause `wait` would compute it again.
        time.sleep(
            max(self._digests.unsettled_seconds(file.path.name, os.fstat(file.descriptor)) for file in self._files)
        )
        self._verify()

    def _verify(self) -> None:
        if self._error is not None:
            return
        try:
            for file in self._files:
                self._compare(file)
        except DamagedTokens as error:
            self._error = error
            if self._ours:
                remove_folder(self._directory, self._files)
        self._digests.save()

    def _compare(self, file: TokenFile) -> None:
        found = self._digests.of(file.path.name, lambda: os.fstat(file.descriptor), file.hash_tokens)
        if found != file.digest:
            raise DamagedTokens(
                f"the tokens of {file.path} are not those that were written (digest {found}, its "
                f"header has {file.digest}): run again to tokenize again; its folder was removed"
                if self._ours
                else f"the tokens of {file.path} have changed since training began: put the file back as it was"
            )


def remove_folder(directory: Path, files: Iterable[TokenFile] = ()) -> None:
    """Removes a damaged folder of the cache, a link or a file of that name, unless it no longer holds `files`.

    If several processes find the damage, one of them removes the folder. A folder that was made again is kept.
    """
    for file in files:
        with contextlib.suppress(OSError):
            if not os.path.samestat(os.stat(file.path), os.fstat(file.descriptor)):
                return
    aside = directory.with_name(f".tmp-damaged-{directory.name}-{os.getpid()}-{time.time_ns()}")
    try:
        os.rename(directory, aside)
    except OSError:  # another process removed it first
        return
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()
