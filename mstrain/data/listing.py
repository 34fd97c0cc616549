"""The files of a data.path, on a local disk or behind an address that fsspec opens, and the digest of their
contents."""

import contextlib
import dataclasses
import difflib
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mstrain.data.compressed import SUFFIXES, decompressed
from mstrain.data.documents import printable, text_digest
from mstrain.data.file_digests import FileDigests

_TRAIN, _VALIDATION, _TEST = "train|training", "validation|valid|val|dev|eval", "test"
_CHECKSUMS = ("md5Hash", "sha256", "blob_id", "ETag", "etag", "crc32c")  # that a remote file system knows of a file


@dataclasses.dataclass(frozen=True)
class Files:
    """Files `names` below `root`, in a fixed order. `remote` is their fsspec file system; None for local files."""

    root: str
    names: tuple[str, ...]
    remote: Any = None
    part: str = ""
    """Names the digests that are remembered of a part of a folder."""
    links: tuple[str, ...] = ()
    """Links to folders below `root`. They are not followed."""

    def path(self, name: str) -> str:
        return os.path.join(self.root, name) if self.remote is None else f"{self.root}/{name}"

    def where(self, name: str) -> str:
        """The path of a file as messages show it."""
        return printable(self.path(name) if self.remote is None else self.remote.unstrip_protocol(self.path(name)))

    def raw(self, name: str) -> Any:
        """The bytes of a file as they are stored, a binary file. Raises OSError when it cannot be opened."""
        return open(self.path(name), "rb") if self.remote is None else self.remote.open(self.path(name), "rb")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """The bytes of a file in order, decompressed. Raises as `decompressed`."""
        with self.raw(name) as file, decompressed(file, self.where(name)) as text:
            yield text

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all files."""
        size = self.remote.size if self.remote is not None else os.path.getsize
        with contextlib.suppress(OSError):
            return sum(size(self.path(name)) or 0 for name in self.names)
        return 0

    def digest(self, cache: Path) -> str:
        """Hash of names and contents. Reads local files that changed since they were last hashed, and remote files of a
        store without checksums.
        """
        if self.remote is not None:
            return text_digest(*self.names, *map(self._remote_digest, self.names))
        root = Path(self.root)
        first, *more = self.names
        digests = FileDigests(cache, (root if more else root / first) / self.part)
        found = [self._remembered(digests, name) for name in self.names]
        digests.save()
        return text_digest(*self.names, *found)

    def _remembered(self, digests: FileDigests, name: str) -> str:
        try:
            return digests.of(name, lambda: os.stat(self.path(name)), lambda: self._hash(name))
        except OSError:
            return "unreadable"

    def _hash(self, name: str) -> str:
        with self.raw(name) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def _remote_digest(self, name: str) -> str:
        self.remote.invalidate_cache()
        info = self.remote.info(self.path(name))
        known = next((str(info[key]) for key in _CHECKSUMS if info.get(key)), None)
        return known or self._hash(name)

    def by_split(self) -> tuple["Files", "Files | None", "Files | None"]:
        """(train, validation, neither) by the words train, validation, valid, val or dev in the names of several files,
        as the Hub names them. Without both words, those of `of_training` are training files."""
        train, held_out = (tuple(n for n in self.names if _has_word(n, words)) for words in (_TRAIN, _VALIDATION))
        if not train or not held_out or set(train) & set(held_out):
            files, rest = self.of_training()
            return files, None, rest
        rest = tuple(name for name in self.names if name not in {*train, *held_out})
        return self.only(train), self.only(held_out), self.only(rest) if rest else None

    def of_training(self) -> tuple["Files", "Files | None"]:
        """(training files, others): all are training files unless every name states a split, and some another one."""
        train = tuple(name for name in self.names if _has_word(name, _TRAIN))
        others = tuple(name for name in self.names if name not in set(train))
        if not train or not others or not all(_has_word(name, f"{_VALIDATION}|{_TEST}") for name in others):
            return self, None
        return self.only(train), self.only(others)

    def without(self, other: "Files") -> "Files":
        """The files that are not among those of `other`."""
        taken = {other._place(name) for name in other.names}
        names = tuple(name for name in self.names if self._place(name) not in taken)
        return self if names == self.names else self.only(names)

    def _place(self, name: str) -> str:
        """Equal for all paths of a file."""
        return os.path.realpath(self.path(name)) if self.remote is None else self.where(name)

    def only(self, names: tuple[str, ...]) -> "Files":
        return dataclasses.replace(self, names=names, part=text_digest(*names))


def states_split(name: str) -> bool:
    """Whether a file's name has the word of a split."""
    return _has_word(name, f"{_TRAIN}|{_VALIDATION}|{_TEST}")


def _has_word(name: str, words: str) -> bool:
    return bool(re.search(rf"(?<![a-zA-Z0-9])({words})(?![a-zA-Z])", name))


def is_address(path: str) -> bool:
    """Whether `path` is an address for fsspec, such as gs://bucket/texts."""
    return bool(re.match(r"[A-Za-z][\w+.-]*://", path)) or "::" in path


def listing(path: str, suffixes: tuple[str, ...], key: str = "data.path") -> Files:
    """A file, the files below a folder, or the files that a pattern matches, sorted.

    Raises ValueError, with what to type for `key`, without one.
    """
    if is_address(path):
        return _remote(path, suffixes, key)
    full = Path(path).expanduser()
    if full.is_file():
        return Files(str(full.parent), (full.name,))
    if glob.has_magic(path) and not full.exists():
        return _matches(full, key)
    if not full.is_dir():
        siblings = sorted(os.listdir(full.parent)) if full.parent.is_dir() else []
        meant = difflib.get_close_matches(full.name, siblings, n=1)
        hint = f", perhaps {full.parent / meant[0]}" if meant and not full.exists() else ""
        raise ValueError(printable(f"{key}={path} is not a file or folder: type one that exists{hint}"))
    names, links = walk(full, suffixes, set())
    if not names:
        raise ValueError(_no_files(f"the folder {key}={path}", suffixes, key))
    return Files(str(full), tuple(names), links=tuple(links))


def split_listing(
    path: str, validation: str | None, suffixes: tuple[str, ...]
) -> tuple[Files, Files | None, Files | None]:
    """(training, validation, other) files of data.path and data.validation; validation is None where there are none.

    A file of `validation` is not a training file. Raises ValueError when no training file is left.
    """
    files = listing(path, suffixes)
    if not validation:
        return files.by_split()
    held_out = listing(validation, suffixes, "data.validation")
    left = files.without(held_out)
    if not left.names:
        raise ValueError(
            f"data.validation={validation} names every file of data.path: type another one, or remove it to hold out "
            "some of the documents"
        )
    train, rest = left.of_training()
    return train, held_out, rest


def _no_files(place: str, suffixes: tuple[str, ...], key: str) -> str:
    plain = ["*" + suffix for suffix in suffixes if suffix and not suffix.endswith(SUFFIXES[1:])]
    return f"{place} has no {' or '.join(plain) or 'visible'} files: type a {key}= that has"


def _remote(path: str, suffixes: tuple[str, ...], key: str) -> Files:
    import fsspec

    try:
        system, full = fsspec.core.url_to_fs(path)
        if "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
            return listing(full, suffixes, key)
        pattern = glob.has_magic(full)
        if pattern:
            found = [name for name in map(str, system.glob(full)) if system.isfile(name)]
        else:
            found = [full] if system.isfile(full) else list(map(str, system.find(full)))
    except Exception as error:  # every file system raises its own
        if str(error).startswith(key):
            raise
        raise ValueError(
            f"cannot list {key}={path} ({type(error).__name__}: {error}): check the address, the credentials and "
            "the network"
        ) from None
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), full.split("/")))
    root = "/".join(fixed if pattern or found != [full] else fixed[:-1]).rstrip("/")
    names = sorted(name[len(root) :].lstrip("/") for name in found)
    if not pattern and found != [full]:
        names = [n for n in names if n.endswith(suffixes) and not any(part.startswith(".") for part in n.split("/"))]
    if not names:
        raise ValueError(_no_files(f"{key}={path}", suffixes, key))
    return Files(root, tuple(names), system)


def _matches(pattern: Path, key: str) -> Files:
    """The files that `pattern` matches, `**` any folders; the root has no wildcard."""
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root = Path(*fixed)
    names = glob.glob(str(Path(*pattern.parts[len(fixed) :])), root_dir=root, recursive=True)
    names = sorted(name for name in names if (root / name).is_file())
    if not names:
        raise ValueError(f"{key}={printable(str(pattern))} matches no file: type a pattern that does")
    return Files(str(root), tuple(names))


def walk(root: str | Path, suffixes: tuple[str, ...], skipped_folders: set[str]) -> tuple[list[str], list[str]]:
    """Sorted relative POSIX names of regular visible files, and of links to visible folders, which are not followed."""
    names, links = [], []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [sub for sub in subfolders if sub not in skipped_folders and not sub.startswith(".")]
        paths = [Path(folder, file) for file in files if file.endswith(suffixes) and not file.startswith(".")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
        folders = [Path(folder, sub) for sub in subfolders]
        links += [path.relative_to(root).as_posix() for path in folders if path.is_symlink()]
    return sorted(names), sorted(links)
