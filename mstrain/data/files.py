"""Text from local files: a Python standard library, a tree of text files, or JSON lines."""

import codecs
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mstrain.checks import TransientError
from mstrain.data.compressed import SUFFIXES, open_text
from mstrain.data.config import nearest
from mstrain.data.documents import Document, Skips, printable, text_digest
from mstrain.data.listing import contents_digest, listing, walk

_CHUNK_BYTES = 1 << 20
# Tests of the library hold deliberately broken files; installed packages differ from host to host.
_NOT_STDLIB = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


class TextFiles:
    """One document per UTF-8 file, verbatim. Raises ValueError when no file is found."""

    unit: str = "files"
    revision: str | None = None

    def __init__(self, root: str | Path, names: list[str]):
        self._root, self._names = Path(root), names

    @classmethod
    def of_path(cls, path: str) -> "TextFiles":
        """The file, or every file below the folder whose path has no part that starts with a dot."""
        return cls(*listing(path, ("",)))

    @classmethod
    def of_stdlib(cls) -> "TextFiles":
        """The *.py files of the running interpreter's standard library, without its tests."""
        root = sysconfig.get_paths()["stdlib"]
        names = walk(root, (".py",), _NOT_STDLIB) if os.path.isdir(root) else []
        if not names:
            raise ValueError(
                f"this Python ships no library sources ({root}): type data=synthetic, or data=text data.path=FOLDER"
            )
        return cls(root, names)

    def fingerprint(self, cache: Path) -> str:
        return text_digest("text", contents_digest(self._root, self._names, cache))

    def documents(self, skips: Skips) -> Iterator[Document]:
        for name in self._names:
            skips.seen += 1
            path = self._root / name
            try:
                with open_text(path) as file:
                    data = file.read(_CHUNK_BYTES + 1)
                if len(data) <= _CHUNK_BYTES:
                    size, chunks = len(data), [data.decode("utf-8")]
                else:
                    size, chunks = sum(size for _, size in _decoded_blocks(path)), _chunks(path)
            except UnicodeDecodeError:
                skips.add("that are not UTF-8", name)
                continue
            except OSError:
                skips.add("that cannot be read", name)
                continue
            if size:
                yield Document(name, size, chunks)


class JsonLines:
    """One document per line of *.jsonl files, .gz and .zst too: text under `field`. Raises ValueError when there is no
    file, or when a file cannot be read.
    """

    unit: str = "lines"
    revision: str | None = None

    def __init__(self, path: str, field: str):
        endings = tuple(kind + suffix for kind in (".jsonl", ".ndjson") for suffix in SUFFIXES)
        self._root, self._names = listing(path, endings)
        self._field = field

    def fingerprint(self, cache: Path) -> str:
        return text_digest("jsonl", self._field, contents_digest(self._root, self._names, cache))

    def documents(self, skips: Skips) -> Iterator[Document]:
        for name in self._names:
            try:
                with open_text(self._root / name) as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield from self._document(f"{name}:{number}", line, skips)
            except OSError as error:
                path = printable(str(self._root / name))
                raise ValueError(f"cannot read {path} ({error.strerror}): make it readable, or remove it") from None

    def _document(self, where: str, line: bytes, skips: Skips) -> Iterator[Document]:
        skips.seen += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return skips.add("that are not JSON", where)
        text = record.get(self._field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            return skips.add(f"without text under {self._field!r}", where + self._other_field(record))
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            return skips.add("whose text is not valid Unicode", where)
        if size:
            yield Document(where, size, [text])

    def _other_field(self, record: object) -> str:
        """Suggests the key that was probably meant, among keys that are short enough for a message."""
        items = record.items() if isinstance(record, dict) else ()
        keys = [key for key, value in items if isinstance(value, str) and len(key) < 40]
        return f" (type data.field={printable(nearest(self._field, keys))}?)" if keys else ""


def _decoded_blocks(path: Path) -> Iterator[tuple[str, int]]:
    """(text, number of its bytes) of a file, block after block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_text(path) as file:
        while block := file.read(_CHUNK_BYTES):
            yield decoder.decode(block), len(block)
    decoder.decode(b"", final=True)


def _chunks(path: Path) -> Iterator[str]:
    """The text of a file already found to be UTF-8, cut after line ends where there are any.

    Each chunk is tokenized separately. Tokens seldom cross a line end.
    """
    rest = ""
    try:
        for block, _ in _decoded_blocks(path):
            rest += block
            cut = rest.rfind("\n") + 1 or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
    except (OSError, UnicodeDecodeError):
        raise TransientError(f"{printable(str(path))} changed while it was read: run again") from None
    if rest:
        yield rest
