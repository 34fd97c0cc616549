"""The interface of text sources: named documents, each a stream of chunks, and counts of skipped units."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Document:
    """One non-empty document. `name` is stable between runs; `chunks` may be iterated once."""

    name: str
    num_bytes: int
    """UTF-8 bytes of the whole text."""
    chunks: Iterable[str]
    answers: tuple[tuple[int, int], ...] | None = None
    """Of a conversation: the ranges of characters of its only chunk that count in the loss."""


_MANY = 10_000  # units after which the fraction of skipped ones is meaningful


class Skips:
    """Counts skipped units of one pass over a source by reason, with the first place of each; `places` lists all.

    `limit` is the largest fraction of units that may be skipped. More raise ValueError, at the end (`check`) or after
    many units.
    """

    def __init__(self, unit: str, limit: float = 1.0):
        self.unit, self.limit = unit, limit
        self.seen = 0
        self.places: list[str] = []
        self._reasons: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, where: str) -> None:
        count, first = self._reasons.get(reason, (0, where))
        self._reasons[reason] = (count + 1, first)
        self.places.append(f"{printable(where)} {reason}")
        if self.seen >= _MANY:
            self.check()

    def check(self) -> None:
        """Raises ValueError when more units than the limit were skipped."""
        if sum(count for count, _ in self._reasons.values()) > self.limit * self.seen:
            raise ValueError(
                f"{'; '.join(self.messages())}: correct them, or type data.max_skipped=1 to train without them"
            )

    def messages(self) -> list[str]:
        """For example: skipped 3 of 120 files that are not UTF-8, first: notes/a.bin"""
        return [
            f"skipped {count} of {self.seen} {self.unit} {reason}, first: {printable(first)}"
            for reason, (count, first) in self._reasons.items()
        ]


class Source(Protocol):
    """A corpus of text that can be read several times in the same order."""

    @property
    def unit(self) -> str:
        """What is counted when something is skipped: files, lines or rows."""
        ...

    @property
    def fraction(self) -> float | None:
        """The part of the source that `documents` has read so far; None when it is not known."""
        ...

    @property
    def revision(self) -> str | None:
        """Commit on the Hugging Face Hub; None for what does not come from there."""
        ...

    def fingerprint(self, cache: Path) -> str:
        """Hash of names and contents; `cache` (data.cache_dir) remembers the digests of files that do not change."""
        ...

    def documents(self, skips: Skips) -> Iterator[Document]:
        """Non-empty readable documents; everything else is added to `skips`."""
        ...


def printable(name: str) -> str:
    """A file name that any terminal and JSON file can hold; undecodable bytes become escapes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def text_digest(*parts: str) -> str:
    """Hash of texts and their boundaries, 32 hex digits; file names with undecodable bytes are legal."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "backslashreplace")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
