"""Rows of `seq` + 1 tokens of a token file, and which of their tokens belong together.

`concat` cuts the file on a grid with stride seq: a row may hold parts of several documents, which see each other.
`segments` cuts it on the same grid and numbers the documents of a row; conversations stay whole where they fit: a row
holds as many as fit, in file order. `none` gives every document rows of its own. Documents longer than a row continue
in the next one.
"""

import numpy as np

from mstrain.data.batch import CONCATENATED, MASKED, PACKED, Batch
from mstrain.data.token_file import ANSWER, START, TokenFile

_BLOCK = 1 << 22  # tokens scanned at a time


class Rows:
    """The rows of one file; with `whole` also its last tokens, in a row that is not full.

    Raises ValueError when it has no documents to tell apart.
    """

    def __init__(self, file: TokenFile, seq: int, pack: str, whole: bool = False):
        self._file, self._seq, self._pack = file, seq, pack
        if pack != "concat" and not file.marks and file.eod is None:
            raise ValueError(
                f"pack={pack} needs an end-of-document token, and {file.path} has none: type data.eos=TOKEN or "
                "pack=concat"
            )
        grid = pack == "concat" or (pack == "segments" and not file.marks)
        starts = np.zeros(1, np.int64) if grid else document_starts(file)
        together = pack == "segments" and not grid
        self._table = None if grid and not whole else _table(starts, file.num_tokens, seq, together)
        self.count = (file.num_tokens - 1) // seq if self._table is None else len(self._table[0])
        if not self.count:
            raise ValueError(f"{file.path} has no document of two tokens: give more text")
        masked = pack == "none" or file.marks or whole
        self.parts = PACKED if pack == "segments" else MASKED if masked else CONCATENATED

    @property
    def begins(self) -> np.ndarray:
        """The first token of every row, int64."""
        return self._table[0] if self._table else np.arange(self.count) * self._seq

    def read(self, numbers: np.ndarray) -> Batch:
        """Rows of these numbers: tokens [n, seq + 1], int32, with segments and mask as `parts` states."""
        starts, lengths = self._places(numbers)
        inside = None if lengths is None else np.arange(self._seq + 1) < lengths[:, None]
        stored = self._cut(self._file, starts, inside)
        tokens = stored.astype(np.int32)
        if self.parts is CONCATENATED:
            return Batch(tokens)
        marks = self._cut(self._file.marks, starts, inside) if self._file.marks else None
        segments, mask = None, np.ones((len(tokens), self._seq), bool)
        if self._pack == "segments":
            last = stored == self._file.eod if marks is None else np.roll((marks & START) > 0, -1)
            mask = ~last[:, :-1]  # not a target that begins another document
            segments = _numbered(last[:, :-1])
        if marks is not None:
            mask &= (marks[:, 1:] & ANSWER) > 0
        if inside is not None:
            mask &= inside[:, 1:]
            if segments is not None:
                segments *= inside[:, :-1]
        return Batch(tokens, segments, mask)

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The first token and the number of tokens of every row; None when all rows are full."""
        if self._table is None:
            return numbers * self._seq, None
        starts, lengths = (column[numbers] for column in self._table)
        return starts, None if lengths.min(initial=self._seq + 1) > self._seq else lengths

    def _cut(self, file: TokenFile, starts: np.ndarray, inside: np.ndarray | None) -> np.ndarray:
        """Tokens [n, seq + 1] of the rows, zeros where they are not `inside` (bool; None: all are)."""
        if inside is None:
            return file.rows(starts, self._seq + 1)
        width = min(self._seq + 1, file.num_tokens)
        begins = np.minimum(starts, file.num_tokens - width)  # a short row at the end of the file
        rows = file.rows(begins, width)
        if width <= self._seq or (begins != starts).any():
            places = (starts - begins)[:, None] + np.arange(self._seq + 1)
            rows = np.take_along_axis(rows, np.minimum(places, width - 1), axis=1)
        return rows * inside


def _numbered(last: np.ndarray) -> np.ndarray:
    """The number of the document of each token in its row, from 1, int32; `last` (bool [n, seq]) ends documents."""
    if not last.any():
        return np.ones(last.shape, np.int32)
    numbers = np.empty(last.shape, np.int32)
    numbers[:, 0], numbers[:, 1:] = 1, last[:, :-1]
    return np.add.accumulate(numbers, axis=1, out=numbers)


def document_starts(file: TokenFile) -> np.ndarray:
    """The first token of every document, int64, in order."""
    found = [np.zeros(1, np.int64)]
    source = file.marks or file
    for start in range(0, file.num_tokens, _BLOCK):
        tokens = source.read(start, start + _BLOCK)
        here = np.flatnonzero(tokens & START) if file.marks else np.flatnonzero(tokens == file.eod) + 1
        found.append(here + start)
    starts = np.unique(np.concatenate(found))
    return starts[starts < file.num_tokens]


def _table(starts: np.ndarray, num_tokens: int, seq: int, together: bool) -> tuple[np.ndarray, np.ndarray]:
    """(first token, tokens) of every row: of one document, or of as many whole ones as fit `together`."""
    ends = np.append(starts[1:], num_tokens)
    if together:
        firsts, place = [], 0
        while place < len(starts):
            firsts.append(place)
            place = max(place + 1, int(np.searchsorted(ends, starts[place] + seq + 1, "right")))
        starts, ends = starts[firsts], ends[np.array([*firsts[1:], len(ends)]) - 1]
    cuts = np.maximum(-(-(ends - starts - 1) // seq), 0)  # rows of each; a token that nothing follows is not one
    which = np.repeat(np.arange(len(starts)), cuts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    begins = starts[which] + number * seq
    return begins, np.minimum(ends[which] - begins, seq + 1)
