"""Chooses validation documents by their names, so that adding a document does not move others."""

import dataclasses
import hashlib
from collections.abc import Iterator

from mstrain.data.documents import Document, Skips, Source

TRAIN, VALIDATION = "train", "validation"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive text of one document that belongs to one split."""

    split: str
    text: str
    num_bytes: int
    ends_document: bool = False
    begins_document: bool = False
    answers: tuple[tuple[int, int], ...] | None = None
    """As in Document."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Train or validation for every document of a corpus."""

    fraction: float
    moved: str | None = None
    """The one document of a small corpus that changes sides, so that no side is empty."""
    tail_of: str | None = None
    """The only document of the corpus; its last bytes are the validation split."""

    def side(self, name: str) -> str:
        held_out = _hash(name) < self.fraction
        return VALIDATION if held_out != (name == self.moved) else TRAIN

    def pieces(self, document: Document) -> Iterator[Piece]:
        """The document's text in order; the last on each side has `ends_document` and may be empty."""
        if document.name != self.tail_of:
            side = self.side(document.name)
            begins = True
            for text in document.chunks:
                size = len(text.encode("utf-8"))
                yield Piece(side, text, size, begins_document=begins, answers=document.answers)
                begins = False
            yield Piece(side, "", 0, ends_document=True)
            return
        sides = set()
        left = max(1, round(document.num_bytes * (1 - self.fraction)))
        for text in document.chunks:
            data = text.encode("utf-8")
            cut = _character_start(data, min(left, len(data)))
            if left:
                yield Piece(TRAIN, data[:cut].decode("utf-8"), cut, left <= len(data), TRAIN not in sides)
                sides.add(TRAIN)
            if cut < len(data):
                yield Piece(VALIDATION, data[cut:].decode("utf-8"), len(data) - cut, False, VALIDATION not in sides)
                sides.add(VALIDATION)
            left = max(0, left - len(data))
        yield Piece(VALIDATION, "", 0, ends_document=True)


def choose_split(source: Source, fraction: float) -> Split:
    """Reads only until both sides have a document; a large corpus needs a few dozen, a tiny one all of them.

    Raises ValueError when the source has no readable document.
    """
    document = None
    skips, plain, names = Skips(source.unit), Split(fraction), []
    for document in source.documents(skips):
        names.append(document.name)
        if {plain.side(names[0]), plain.side(names[-1])} == {TRAIN, VALIDATION}:
            return plain
    if not names:
        reasons = "; ".join(skips.messages()) or f"all {skips.seen} {skips.unit} are empty"
        raise ValueError(f"the corpus has no text ({reasons}): type a data.path= that holds UTF-8 text")
    if len(names) == 1:
        if document and document.answers is not None:
            raise ValueError("one conversation cannot be split: give more, or data.validation=FILE")
        return Split(fraction, tail_of=names[0])
    return Split(fraction, moved=min(names, key=_hash))


def _hash(name: str) -> float:
    """A number in [0, 1) that depends only on the name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _character_start(data: bytes, position: int) -> int:
    """The nearest start of a UTF-8 character at or before `position`."""
    while 0 < position < len(data) and data[position] & 0xC0 == 0x80:
        position -= 1
    return position
