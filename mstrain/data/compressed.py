"""Files of text as bytes, decompressed when their first bytes are those of gzip or Zstandard; file names do not
matter."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from mstrain.data.documents import printable

SUFFIXES = ("", ".gz", ".zst")
"""What may follow the usual ending of a file's name."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of `path`, to be read in order; several compressed streams in one file are one text.

    Raises OSError when the file cannot be opened, and ValueError, which names it, when compressed data are truncated
    or damaged.
    """
    with open(path, "rb") as file:
        start = file.peek(4)
        try:
            if start.startswith(_GZIP):
                with gzip.open(file) as text:
                    yield cast(BinaryIO, text)
            elif start.startswith(_ZSTD):
                yield _zstandard(file)
            else:
                yield file
        except (EOFError, zlib.error, OSError) as error:
            if not start.startswith((_GZIP, _ZSTD)):
                raise
            raise ValueError(
                f"{printable(str(path))} is truncated or damaged ({str(error).rstrip('.')}): copy or compress it again"
            ) from None


def _zstandard(file: BinaryIO) -> BinaryIO:
    try:
        import pyarrow
    except ImportError:
        raise ValueError("a .zst file needs the package pyarrow: pip install pyarrow") from None
    return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"), buffer_size=1 << 20)
