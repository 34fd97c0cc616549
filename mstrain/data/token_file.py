"""A token file: one split of a corpus as a flat array on disk, read by memory map.

Layout: a header of 4096 bytes (one JSON object, padded with spaces, so `head -c 4096` shows it), then
the `num_tokens` little-endian uint16 (uint32 above 65536 symbols).
"""

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np

MAGIC = "mstrain-tokens"
VERSION = 1
_HEADER_BYTES = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """An opened token file. `tokens` is a read-only memory map [num_tokens], uint16 or uint32."""

    path: Path
    vocab_size: int
    num_documents: int
    text_bytes: int
    """UTF-8 bytes of the text behind the tokens; 0 when they were not made from text."""
    digest: str
    """Hash of the tokens alone: equal on every host and after every re-tokenisation that changed nothing."""
    tokens: np.ndarray = dataclasses.field(repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, end-of-document tokens counted; None when the tokens are not text."""
        return self.text_bytes / self.num_tokens if self.text_bytes else None

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        """A loss in nats per token in bits per byte of this file's text; None when it has no text."""
        return nats_per_token / math.log(2) / self.bytes_per_token if self.text_bytes else None

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Map `path`. Raises ValueError when missing, truncated, or not a token file of this version."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                header = _parse_header(file.read(_HEADER_BYTES))
            size = os.path.getsize(path)
        except OSError as error:
            raise ValueError(f"cannot read token file {path} ({error.strerror}): {_FIX}") from None
        if header is None:
            raise ValueError(f"{path} is not an mstrain token file of version {VERSION}: {_FIX}")
        dtype, num_tokens = _dtype(header["vocab_size"]), header["num_tokens"]
        expected = _HEADER_BYTES + num_tokens * dtype.itemsize
        if size != expected:
            raise ValueError(f"{path} has {size} bytes where its header promises {expected}: {_FIX}")
        tokens = np.empty(0, dtype)
        if num_tokens:
            tokens = np.memmap(path, dtype, mode="r", offset=_HEADER_BYTES, shape=(num_tokens,))
        fields = {key: header[key] for key in ("vocab_size", "num_documents", "text_bytes", "digest")}
        return cls(path=path, tokens=tokens, **fields)


_FIX = "delete its folder and run again to tokenise anew"


class TokenWriter:
    """Writes one token file piece by piece; a context manager whose clean exit makes the file valid."""

    def __init__(self, path: Path, vocab_size: int):
        self._file = open(path, "wb")
        self._file.write(b" " * _HEADER_BYTES)
        self._dtype, self._vocab_size = _dtype(vocab_size), vocab_size
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_tokens = self.num_documents = self.text_bytes = 0

    def append(self, ids: np.ndarray, text_bytes: int = 0) -> None:
        """Append token ids [n] of any integer dtype that stand for `text_bytes` bytes of text."""
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
            "magic": MAGIC, "version": VERSION, "dtype": self._dtype.name, "vocab_size": self._vocab_size,
            "num_tokens": self.num_tokens, "num_documents": self.num_documents,
            "text_bytes": self.text_bytes, "digest": self._digest.hexdigest()}
        self._file.seek(0)
        self._file.write(json.dumps(header).encode().ljust(_HEADER_BYTES - 1) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _parse_header(data: bytes) -> dict | None:
    """The header as a dict whose values have the right types; None for anything else."""
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or (header.get("magic"), header.get("version")) != (MAGIC, VERSION):
        return None
    counts = [header.get(key) for key in ("num_tokens", "vocab_size", "num_documents", "text_bytes")]
    sound = all(type(count) is int and 0 <= count < 1 << 62 for count in counts)  # true is an int too
    sound = sound and isinstance(header.get("digest"), str)
    return header if sound and header.get("dtype") == _dtype(header["vocab_size"]).name else None
