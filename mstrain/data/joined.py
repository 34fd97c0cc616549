"""Token files side by side: ranges of several files as one, and the flat files of data=tokens."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mstrain.data.config import DataConfig
from mstrain.data.documents import text_digest
from mstrain.data.file_digests import FileDigests
from mstrain.data.listing import Files, is_address, split_listing
from mstrain.data.token_file import TokenFile

_SUFFIXES = (".bin", ".npy")  # ends of the names of files of token ids in a folder
_BLOCK = 1 << 22  # tokens read at a time
Range = tuple[TokenFile, int, int]


class JoinedTokens:
    """Ranges (file, first token, end) of token files, one after the other; read as a TokenFile."""

    marks, num_documents, text_bytes = None, 0, 0

    def __init__(self, ranges: Sequence[Range]):
        self.ranges = list(ranges)
        first = self.ranges[0][0]
        self.path, self.vocab_size, self.eod = first.path, first.vocab_size, first.eod
        self._ends = np.cumsum([end - begin for _, begin, end in self.ranges])
        self.num_tokens = int(self._ends[-1])
        begins = np.array([begin for _, begin, _ in self.ranges])
        self._shifts = begins - np.concatenate([[0], self._ends[:-1]])  # from tokens of all to tokens of a file
        self._dtype = np.result_type(*(file.dtype for file, _, _ in self.ranges))
        self.digest = text_digest(*(f"{file.digest} {begin} {end}" for file, begin, end in self.ranges))

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """As TokenFile.rows; a row may continue in the next file."""
        places = np.searchsorted(self._ends, starts, "right")
        inside = starts + self._shifts[places]
        if len(self.ranges) == 1:
            return self.ranges[0][0].rows(inside, length)
        rows = np.empty((len(starts), length), self._dtype)
        whole = starts + length <= self._ends[places]
        for place in set(places[whole].tolist()):
            here = whole & (places == place)
            rows[here] = self.ranges[place][0].rows(inside[here], length)
        for row in np.flatnonzero(~whole).tolist():
            rows[row] = self._across(int(places[row]), int(inside[row]), length)
        return rows

    def _across(self, place: int, inside: int, length: int) -> np.ndarray:
        """Tokens [length] from token `inside` of the file number `place` on, which continue in the next files."""
        parts = []
        while length:
            file, _, end = self.ranges[place]
            parts.append(file.rows(np.array([inside]), min(length, end - inside))[0])
            length -= len(parts[-1])
            place += 1
            inside = self.ranges[place][1] if length else 0
        return np.concatenate(parts)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        return self.rows(np.array([start]), stop - start)[0]

    def bits_per_byte(self, nats_per_token: float) -> None:
        """None: how many bytes of text the tokens are is not known."""


def open_flat_tokens(config: DataConfig, vocab_size: int, eod: int | None) -> tuple[list[TokenFile], list, list]:
    """(files, training ranges, validation ranges) of data=tokens.

    Validation is data.validation, or the files with val or validation in their names, or the last
    `validation_fraction` of the tokens. Raises ValueError for files that do not hold ids of the vocabulary.
    """
    if is_address(str(config.path)):
        raise ValueError(f"data=tokens reads local files: copy data.path={config.path}, or mount it")
    found, held_out, _ = split_listing(str(config.path), config.validation, _SUFFIXES)
    train = _open_all(found, config, vocab_size, eod)
    if held_out is not None:
        validation = _open_all(held_out, config, vocab_size, eod)
        return train + validation, _whole(train), _whole(validation)
    ranges, left = [], max(2, round(sum(file.num_tokens for file in train) * config.validation_fraction))
    for file in reversed(train):
        cut = max(0, file.num_tokens - left)
        ranges.insert(0, (file, cut, file.num_tokens))
        left -= file.num_tokens - cut
    kept = [(file, 0, file.num_tokens - end + begin) for file, begin, end in ranges]
    return train, [r for r in kept if r[2]], [r for r in ranges if r[1] < r[2]]


def _whole(files: list[TokenFile]) -> list[Range]:
    return [(file, 0, file.num_tokens) for file in files]


def _open_all(files: Files, config: DataConfig, vocab_size: int, eod: int | None) -> list[TokenFile]:
    cache, root = Path(config.cache_dir).expanduser(), Path(files.root)
    digests, largest = FileDigests(cache, root), FileDigests(cache, root / "largest")
    opened = []
    for name in files.names:
        file = TokenFile.open_flat(files.path(name), vocab_size, config.token_dtype, eod)
        stat, read_as = functools.partial(os.fstat, file.descriptor), f"{name} as {file.flat}"
        _check_ids(file, int(largest.of(read_as, stat, lambda file=file: str(_largest(file)))))
        digest = digests.of(read_as, stat, file.hash_tokens)
        opened.append(dataclasses.replace(file, descriptor=os.dup(file.descriptor), digest=digest))
    digests.save()
    largest.save()
    return opened


def _check_ids(file: TokenFile, largest: int) -> None:
    if largest >= file.vocab_size:
        place, token = _first_outside(file)
        byte = file.first_byte + place * file.dtype.itemsize
        dtype = "" if file.first_byte else ", or another data.token_dtype="
        raise ValueError(
            f"{file.path}: token {place} (byte {byte}) is id {token}, outside the vocabulary of {file.vocab_size}: "
            f"type vocab_size={largest + 1} or more, or the tokenizer that made it{dtype}"
        )


def _blocks(file: TokenFile):
    """(number of the first token, ids) of the whole file, unchecked."""
    for start in range(0, file.num_tokens, _BLOCK):
        yield start, file.unchecked_rows(np.array([start]), min(_BLOCK, file.num_tokens - start))[0]


def _largest(file: TokenFile) -> int:
    return max(int(ids.max()) for _, ids in _blocks(file))


def _first_outside(file: TokenFile) -> tuple[int, int]:
    for start, ids in _blocks(file):
        if len(bad := np.flatnonzero(ids >= file.vocab_size)):
            return start + int(bad[0]), int(ids[bad[0]])
    raise AssertionError("the file has changed")
