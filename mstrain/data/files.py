"""Text from files: a Python standard library, a tree of text files, JSON lines, or Parquet."""

import codecs
import contextlib
import io
import json
import os
import sysconfig
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from mstrain.checks import TransientError
from mstrain.data.compressed import SUFFIXES, decompressed
from mstrain.data.config import nearest
from mstrain.data.documents import Document, Skips, text_digest
from mstrain.data.listing import Files, walk

_CHUNK_BYTES = 1 << 20
# Tests of the library hold deliberately broken files; installed packages differ from host to host.
_NOT_STDLIB = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


class FileSource:
    """What the sources of files have in common. Subclasses set `kind`, `unit` and the `endings` of the files that are
    read from a folder, and define `documents`."""

    kind: str
    unit: str
    endings: tuple[str, ...] = ("",)
    revision: str | None = None

    def __init__(self, files: Files, *options: str):
        self.files, self._options = files, options
        self._total, self._read, self._raw = files.num_bytes, 0, None
        self._open_or_closed = threading.Lock()

    def fingerprint(self, cache) -> str:
        return text_digest(self.kind, *self._options, self.files.digest(cache))

    @property
    def fraction(self) -> float | None:
        with self._open_or_closed:  # another thread reads, and must not close the file here
            here = self._raw.tell() if self._raw else 0
        return min((self._read + here) / self._total, 1.0) if self._total else None

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        """The decompressed bytes of a file; `fraction` counts the stored ones."""
        with self.files.raw(name) as raw, decompressed(raw, self.files.where(name)) as text:
            self._raw = raw
            try:
                yield text
            finally:
                with self._open_or_closed:
                    self._read, self._raw = self._read + raw.tell(), None

    @contextlib.contextmanager
    def _readable(self, name: str):
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot read {self.files.where(name)} ({error.strerror or error}): make it readable, or remove it"
            ) from None


class TextFiles(FileSource):
    """One document per UTF-8 file, verbatim. Raises ValueError when no file is found."""

    kind, unit = "text", "files"

    @classmethod
    def of_stdlib(cls) -> "TextFiles":
        """The *.py files of the running interpreter's standard library, without its tests."""
        root = sysconfig.get_paths()["stdlib"]
        names = walk(root, (".py",), _NOT_STDLIB)[0] if os.path.isdir(root) else []
        if not names:
            raise ValueError(
                f"this Python ships no library sources ({root}): type data=synthetic, or data=text data.path=FOLDER"
            )
        return cls(Files(root, tuple(names)))

    def documents(self, skips: Skips) -> Iterator[Document]:
        self._read = 0
        for name in self.files.names:
            skips.seen += 1
            try:
                with self._open(name) as file:
                    data = file.read(_CHUNK_BYTES + 1)
                if len(data) <= _CHUNK_BYTES:
                    size, chunks = len(data), [data.decode("utf-8")]
                else:
                    size, chunks = sum(size for _, size in self._decoded_blocks(name)), self._chunks(name)
            except UnicodeDecodeError:
                skips.add("that are not UTF-8", name)
                continue
            except OSError:
                skips.add("that cannot be read", name)
                continue
            if size:
                yield Document(name, size, chunks)

    def _decoded_blocks(self, name: str) -> Iterator[tuple[str, int]]:
        """(text, number of its bytes) of a file, block after block."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with self.files.open(name) as file:
            while block := file.read(_CHUNK_BYTES):
                yield decoder.decode(block), len(block)
        decoder.decode(b"", final=True)

    def _chunks(self, name: str) -> Iterator[str]:
        """The text of a file already found to be UTF-8, cut after line ends where there are any.

        Each chunk is tokenized separately. Tokens seldom cross a line end.
        """
        rest = ""
        try:
            for block, _ in self._decoded_blocks(name):
                rest += block
                cut = rest.rfind("\n") + 1 or len(rest)
                yield rest[:cut]
                rest = rest[cut:]
        except (OSError, UnicodeDecodeError):
            raise TransientError(f"{self.files.where(name)} changed while it was read: run again") from None
        if rest:
            yield rest


class JsonLines(FileSource):
    """One document per line of *.jsonl files: text under `field`. Raises ValueError without a file, or when a
    file cannot be read.
    """

    kind, unit = "jsonl", "lines"
    endings = tuple(kind + suffix for kind in (".jsonl", ".ndjson") for suffix in SUFFIXES)

    def __init__(self, files: Files, field: str):
        super().__init__(files, field)
        self._field = field

    def documents(self, skips: Skips) -> Iterator[Document]:
        for where, line in self._lines(skips):
            try:
                record = json.loads(line.decode("utf-8-sig"))  # of bytes, it takes UTF-16 too, cut at the wrong places
            except (ValueError, RecursionError):
                skips.add("that are not JSON", where)
                continue
            yield from self._document(where, record, skips)

    def _lines(self, skips: Skips) -> Iterator[tuple[str, bytes]]:
        """(file:number, line) of every line that is not blank."""
        self._read = 0
        for name in self.files.names:
            with self._readable(name), self._open(name) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        skips.seen += 1
                        yield f"{name}:{number}", line

    def _document(self, where: str, record: Any, skips: Skips) -> Iterator[Document]:
        text = record.get(self._field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            return skips.add(f"without text under {self._field!r}", where + self._other_field(record))
        if (size := utf8_bytes(text)) is None:
            return skips.add("whose text is not valid Unicode", where)
        if size:
            yield Document(where, size, [text])

    def _other_field(self, record: object) -> str:
        """Suggests the key that was probably meant, among keys that are short enough for a message."""
        items = record.items() if isinstance(record, dict) else ()
        keys = [key for key, value in items if isinstance(value, str) and len(key) < 40]
        return f" (keys: {', '.join(keys)}; type data.field={nearest(self._field, keys)}?)" if keys else ""


class ParquetFiles(FileSource):
    """One document per row of *.parquet files: text in column `field`. Raises ValueError when a file has no such column
    or is damaged.
    """

    kind, unit, endings = "parquet", "rows", (".parquet", ".pq")

    def __init__(self, files: Files, field: str):
        super().__init__(files, field)
        self._field = field

    def documents(self, skips: Skips) -> Iterator[Document]:
        self._read = 0
        for name in self.files.names:
            row = 0
            for texts in self._columns(name):
                for text in texts:
                    row += 1
                    skips.seen += 1
                    if not isinstance(text, str):
                        skips.add(f"without text in column {self._field!r}", f"{name}:{row}")
                    elif (size := utf8_bytes(text)) is None:
                        skips.add("whose text is not valid Unicode", f"{name}:{row}")
                    elif size:
                        yield Document(f"{name}:{row}", size, [text])

    def _columns(self, name: str) -> Iterator[list]:
        """The column's values, some rows at a time."""
        import pyarrow
        import pyarrow.parquet as parquet

        with self._readable(name), self.files.raw(name) as raw:
            try:
                file = parquet.ParquetFile(raw)
                names = file.schema_arrow.names
                check_column(self._field, names, self.files.where(name))
                for rows in file.iter_batches(1000, columns=[self._field]):
                    yield _texts(rows.column(0))
            except pyarrow.ArrowException as error:
                reason = str(error).split("\n")[0]
                raise ValueError(
                    f"{self.files.where(name)} is not a Parquet file, or damaged ({reason}): copy it again"
                ) from None
            finally:
                with contextlib.suppress(ValueError):
                    self._read += raw.seek(0, io.SEEK_END)


def _texts(column: Any) -> list:
    """The values of a column of Arrow; bytes that are not UTF-8 become lone surrogates."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [value and value.decode("utf-8", "surrogateescape") for value in column.cast("binary").to_pylist()]


def utf8_bytes(text: str) -> int | None:
    """The size of a text in UTF-8; None when it is not valid Unicode."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return None


def check_column(field: str, names: list[str], place: str) -> None:
    """Raises ValueError, which lists the columns, when `field` is none of them."""
    if field not in names:
        raise ValueError(
            f"{place} has no column {field!r} (columns: {', '.join(names) or 'none'})"
            + (f": type data.field={nearest(field, names)}" if names else "")
        )
