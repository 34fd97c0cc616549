"""The header of a token file: 4096 bytes, one JSON object padded with spaces, with a checksum of itself."""

import json
import os
import re
import stat
from pathlib import Path

import numpy as np

from mstrain.data.documents import text_digest

MAGIC = "mstrain-tokens"
VERSION = 2
HEADER_BYTES = 4096
FIX = "delete its folder and run again to tokenize again"


def encode_header(header: dict) -> bytes:
    """The 4096 bytes of a header: its fields and their checksum."""
    checked = header | {"checksum": text_digest(json.dumps(header))}
    return json.dumps(checked).encode().ljust(HEADER_BYTES - 1) + b"\n"


def dtype_of(vocab_size: int) -> np.dtype:
    """Of the tokens: uint16 where it holds the vocabulary, uint32 otherwise; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_header(path: Path, descriptor: int) -> dict:
    """The fields of `TokenFile` that the header states; raises ValueError when they cannot be true of the file."""
    try:
        regular, size = stat.S_ISREG(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size
        header = parse_header(os.pread(descriptor, HEADER_BYTES, 0)) if regular else None
    except OSError as error:
        raise ValueError(f"cannot read token file {path} ({error.strerror}): {FIX}") from None
    if header is None:
        raise ValueError(f"{path} is not an mstrain token file of version {VERSION}, or its header is damaged: {FIX}")
    expected = HEADER_BYTES + header["num_tokens"] * dtype_of(header["vocab_size"]).itemsize
    if size != expected:
        raise ValueError(f"{path} has {size} bytes, but its header states {expected}: {FIX}")
    return {key: header[key] for key in ("vocab_size", "num_tokens", "num_documents", "text_bytes", "digest")}


def parse_header(data: bytes) -> dict | None:
    """The header as a dict whose values have the right types; None for anything else."""
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or (header.get("magic"), header.get("version")) != (MAGIC, VERSION):
        return None
    fields = {key: value for key, value in header.items() if key != "checksum"}
    if encode_header(fields) != data:  # any changed bit, the padding included
        return None
    counts = [header.get(key) for key in ("num_tokens", "vocab_size", "num_documents", "text_bytes")]
    sound = all(type(count) is int and 0 <= count < 1 << 62 for count in counts)  # true is an int too
    sound = sound and 0 < header["vocab_size"] <= 1 << 32
    sound = sound and isinstance(header.get("digest"), str) and re.fullmatch("[0-9a-f]{32}", header["digest"])
    return header if sound and header.get("dtype") == dtype_of(header["vocab_size"]).name else None
