"""Files of text as bytes, decompressed when their first bytes are those of gzip or Zstandard; file names do not
matter."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

SUFFIXES = ("", ".gz", ".zst")
"""What may follow the usual ending of a file's name."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def decompressed(raw: BinaryIO, where: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of `raw`, to be read in order; several compressed streams in one file are one text.

    Raises ValueError, which names the file by `where`, when compressed data are truncated or damaged.
    """
    file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, raw), 1 << 20)
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
            f"{where} is truncated or damaged ({str(error).rstrip('.')}): copy or compress it again"
        ) from None


def _zstandard(file: BinaryIO) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"), buffer_size=1 << 20)
