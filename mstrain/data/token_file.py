"""A token file: one split of a corpus as a flat array on disk.

Layout: a header of 4096 bytes (one JSON object, padded with spaces, so `head -c 4096` shows it), then the `num_tokens`
little-endian uint16 (uint32 above 65536 tokens of vocabulary). The header has a checksum of itself and a digest of the
tokens. Tokens are read into buffers and never memory-mapped: a file that is truncated while it is read raises an
error, but a memory map would end the process with SIGBUS.
"""

import dataclasses
import functools
import hashlib
import math
import os
import weakref
from pathlib import Path

import numpy as np

from mstrain.checks import TransientError
from mstrain.data.flat_layout import flat_layout
from mstrain.data.token_header import FIX, HEADER_BYTES, MAGIC, VERSION, dtype_of, encode_header, read_header

ANSWER, START = 1, 2  # marks of a token: it counts in the loss, it begins a document
_COUNTS = ("num_tokens", "num_documents", "text_bytes")
_DIGEST_BLOCK = 1 << 22  # tokens hashed at a time
AGAIN = "run again, which makes the file again from its text and resumes from the last checkpoint"


class DamagedTokens(TransientError):
    """The tokens of a file are not those that were written. `prepare` makes the file again from its text."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """An opened token file: `num_tokens` tokens of `dtype` (uint16 or uint32)."""

    path: Path
    vocab_size: int
    num_tokens: int
    num_documents: int
    text_bytes: int
    """UTF-8 bytes of the tokenized text; 0 when they were not made from text."""
    digest: str
    """Hash of the tokens, as the header states it: equal on every host. `Corpus.verification` compares it with the
    tokens."""
    descriptor: int = dataclasses.field(repr=False)
    eod: int | None = None
    """The token that ends every document; None when documents end without a mark, or it is not known."""
    marks: "TokenFile | None" = None
    """Of a corpus of conversations: ANSWER and START of every token, as a file of as many tokens."""
    flat: str | None = None
    """The dtype of a file that belongs to somebody else."""
    first_byte: int = HEADER_BYTES
    """Where the tokens begin."""
    _opened: os.stat_result = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)
        object.__setattr__(self, "_opened", os.fstat(self.descriptor))

    @functools.cached_property
    def dtype(self) -> np.dtype:
        return np.dtype(self.flat).newbyteorder("<") if self.flat else dtype_of(self.vocab_size)

    @property
    def _again(self) -> str:
        return "put the file back as it was" if self.flat else AGAIN

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        """A loss in nats per token in bits per byte of this file's text; None when it has no text."""
        if self.marks:
            return None
        return nats_per_token / math.log(2) * self.num_tokens / self.text_bytes if self.text_bytes else None

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [len(starts), length] in the file's dtype: row i begins at token `starts[i]`.

        Raises DamagedTokens when the file cannot be read, was truncated, written to or replaced since it was opened, or
        holds a token id outside its vocabulary.
        """
        rows = self.unchecked_rows(starts, length)
        if rows.size and (largest := int(rows.max())) >= self.vocab_size:
            raise DamagedTokens(
                f"{self.path} holds token id {largest}, outside its vocabulary of {self.vocab_size}: {self._again}"
            )
        return rows

    def unchecked_rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        size = length * self.dtype.itemsize
        try:
            offsets = (self.first_byte + starts * self.dtype.itemsize).tolist()
            data = bytearray().join([os.pread(self.descriptor, size, offset) for offset in offsets])
            if len(data) < size * len(offsets):
                data = bytearray().join([self._complete(size, offset) for offset in offsets])
            self._check_unchanged()
        except OSError as error:
            raise DamagedTokens(f"cannot read token file {self.path} ({error.strerror}): {self._again}") from None
        return np.frombuffer(data, self.dtype).reshape(len(offsets), length)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [stop - start] from `start` on, up to the end by default. Raises as `rows` does."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        return self.rows(np.array([start]), stop - start)[0]

    def hash_tokens(self) -> str:
        """The digest of the tokens that the file has now; reads all of it, at about 0.6 GB/s."""
        digest = _new_digest(self.dtype)
        for start in range(0, self.num_tokens, _DIGEST_BLOCK):
            length = min(_DIGEST_BLOCK, self.num_tokens - start)
            digest.update(self.unchecked_rows(np.array([start]), length)[0].data)
        return digest.hexdigest()

    @classmethod
    def open(cls, path: str | Path, eod: int | None = None) -> "TokenFile":
        """With its marks, if there are any. Raises ValueError when a file is missing, truncated, or not a token file of
        this version.
        """
        path = Path(path)
        try:
            # O_NONBLOCK: opening a named pipe must not wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"cannot read token file {path} ({error.strerror}): {FIX}") from None
        try:
            marks = cls.open(marks_path(path)) if marks_path(path).exists() and path.suffix == ".bin" else None
            return cls(path, descriptor=descriptor, eod=eod, marks=marks, **read_header(path, descriptor))
        except ValueError:
            os.close(descriptor)
            raise

    @classmethod
    def open_flat(cls, path: str | Path, vocab_size: int, dtype: str, eod: int | None = None) -> "TokenFile":
        """A file of token ids alone, as nanoGPT writes them, or one of NumPy or llm.c, whose header states the dtype;
        only ever read. Its digest is still to be set.

        Raises ValueError when it cannot be read or its size is not one of such a file.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): make it readable") from None
        try:
            dtype, first, count = flat_layout(path, descriptor, dtype)
        except ValueError:
            os.close(descriptor)
            raise
        return cls(path, vocab_size, count, 0, 0, "", descriptor, eod, flat=dtype, first_byte=first)

    def _complete(self, size: int, offset: int) -> bytes:
        """`size` bytes: one call returns at most 2 GiB, and on some file systems less than asked for."""
        parts, missing = [], size
        while missing:
            parts.append(os.pread(self.descriptor, missing, offset + size - missing))
            if not parts[-1]:
                raise self._changed("truncated")
            missing -= len(parts[-1])
        return b"".join(parts)

    def _check_unchanged(self) -> None:
        now, opened = os.fstat(self.descriptor), self._opened
        if now.st_size != opened.st_size:
            raise self._changed("truncated" if now.st_size < opened.st_size else "extended")
        if now.st_mtime_ns != opened.st_mtime_ns:
            raise self._changed("written to")
        if now.st_ctime_ns != opened.st_ctime_ns:  # also when its mode changes, or the name of its last link
            try:
                replaced = not os.path.samestat(os.stat(self.path), now)
            except FileNotFoundError:
                return  # removed, but still open: its tokens are unchanged
            if replaced:
                raise self._changed("replaced")

    def _changed(self, how: str) -> DamagedTokens:
        return DamagedTokens(f"token file {self.path} was {how} while it was read: {self._again}")


def marks_path(path: Path) -> Path:
    return path.with_suffix(".marks")


class TokenWriter:
    """Writes one token file piece by piece; a context manager whose clean exit makes the file valid.

    `state` is that of an earlier writer of the same path: writing continues there.
    """

    def __init__(self, path: Path, vocab_size: int, state: dict[str, int] | None = None):
        self._dtype, self._vocab_size = dtype_of(vocab_size), vocab_size
        self._digest = _new_digest(self._dtype)
        self.num_tokens = self.num_documents = self.text_bytes = 0
        if state is None:
            self._file = open(path, "wb")
            self._file.write(b" " * HEADER_BYTES)
            return
        self._file = open(path, "r+b")
        self.num_tokens, self.num_documents, self.text_bytes = (state[key] for key in _COUNTS)
        self._file.truncate(HEADER_BYTES + self.num_tokens * self._dtype.itemsize)
        self._file.seek(HEADER_BYTES)
        while block := self._file.read(_DIGEST_BLOCK):
            self._digest.update(block)

    def sync(self) -> dict[str, int]:
        """Makes what was appended durable; returns the state with which a later writer continues."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {key: getattr(self, key) for key in _COUNTS}

    def append(self, ids: np.ndarray, text_bytes: int = 0) -> None:
        """Appends token ids [n] of any integer dtype, made from `text_bytes` bytes of text."""
        data = np.ascontiguousarray(ids, self._dtype).data
        self._digest.update(data)
        self._file.write(data)
        self.num_tokens += len(ids)
        self.text_bytes += text_bytes

    def end_document(self, eod: int | None) -> None:
        self.num_documents += 1
        if eod is not None:
            self.append(np.array([eod]))

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, failure: type | None, *_) -> None:
        with self._file:
            if failure is None:
                self._finish()

    def _finish(self) -> None:
        header = {
            "magic": MAGIC,
            "version": VERSION,
            "dtype": self._dtype.name,
            "vocab_size": self._vocab_size,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "text_bytes": self.text_bytes,
            "digest": self._digest.hexdigest(),
        }
        self._file.seek(0)
        self._file.write(encode_header(header))
        self.sync()


def _new_digest(dtype: np.dtype):
    """A hash of tokens as bytes. It includes the dtype, because two uint16 have the same bytes as one uint32."""
    return hashlib.blake2b(digest_size=16, person=b"" if dtype.itemsize == 2 else dtype.name.encode())
