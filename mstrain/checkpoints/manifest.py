"""Checksums of a folder's files, written into the folder before it appears under its final name.

Orbax checks that a checkpoint is complete, and TensorStore checks some of its own indices. Neither detects a
flipped bit in an array. Every process digests the files that it wrote (`write_part`), all at the same time;
process 0 joins these parts (`join`) and digests what is left: indices and metadata, a few kilobytes.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
from pathlib import PurePosixPath

from etils import epath

NAME = "manifest.json"
LEFT_OUT = {NAME, "_CHECKPOINT_METADATA"}  # Orbax changes the latter at the commit, and does not need it
THREADS = min(8, os.cpu_count() or 1)  # that digest files; hashlib releases the interpreter


def write_part(item: epath.Path, process: int, record: dict) -> int:
    """Writes size and SHA-256 of what `process` wrote into `item`, and `record`; returns the bytes.

    Orbax keeps the arrays of process 3 in the folder `ocdbt.process_3`.
    """
    files = _digests(item, _files(item / f"ocdbt.process_{process}"))
    size = sum(size for size, _ in files.values())
    _part(item, process).write_text(json.dumps({"files": files, "host": {**record, "bytes": size}}))
    return size


def join(folder: epath.Path, item: str, processes: int) -> None:
    """Writes the manifest of `folder` from the parts that `processes` wrote into its subfolder `item`.

    The manifest also holds the records of the processes, as `hosts`.
    """
    files, hosts = {}, []
    for process in range(processes):  # by name: listings of network file systems may be late
        part = _part(folder / item, process)
        content = json.loads(part.read_text())
        files |= {f"{item}/{name}": facts for name, facts in content["files"].items()}
        hosts.append(content["host"])
        part.unlink()
    write(folder, files, hosts)


def write(folder: epath.Path, known: dict | None = None, hosts: list | None = None) -> None:
    """Writes size and SHA-256 of every file under `folder`; those of `known` files are not computed again."""
    known = known or {}
    rest = [path for path in _files(folder) if path.relative_to(folder).as_posix() not in known]
    content = {"files": dict(sorted({**known, **_digests(folder, rest)}.items()))} | ({"hosts": hosts} if hosts else {})
    (folder / NAME).write_text(json.dumps(content, indent=1) + "\n")


def read(folder: epath.Path) -> dict:
    """The content of the manifest, not checked; raises ValueError or OSError if it cannot be read."""
    return json.loads((folder / NAME).read_text())


def size(folder: os.PathLike) -> int:
    """Bytes of all files that the manifest names; 0 when it cannot be read."""
    try:
        return sum(int(size) for size, _ in read(epath.Path(folder))["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0


def problems(folder: os.PathLike, part: int = 0, parts: int = 1) -> list[str]:
    """What differs from the manifest, one sentence each; looks at every `parts`-th file from `part` on.

    A folder without a manifest was half deleted by a run that was killed while it removed old ones, or is
    from elsewhere.
    """
    folder = epath.Path(folder)
    if not (folder / NAME).exists():
        return [f"{NAME} is missing: it was half deleted, or not written by mstrain"]
    try:
        files = dict(read(folder)["files"])
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in sorted(files.items())}
    except (ValueError, KeyError, TypeError, OverflowError):
        return [f"{NAME} is damaged"]
    own = list(expected.items())[part::parts]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        return [text for text in threads.map(functools.partial(_problem, folder), own) if text]


def _problem(folder: epath.Path, entry: tuple[str, tuple[int, str]]) -> str | None:
    name, (size, digest) = entry
    file = folder / name
    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
        return f"{NAME} names a file outside the folder"
    try:
        if (length := file.stat().length) != size:
            return f"{name} has {length} bytes, {size} were written"
        if _digest(file) != digest:
            return f"{name} has changed since it was written (checksum differs)"
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read: {error}"
    return None


def _part(item: epath.Path, process: int) -> epath.Path:
    return item / f"manifest.process_{process}.json"


def _files(folder: epath.Path) -> list[epath.Path]:
    """The files under `folder`, in all its subfolders, but those that are LEFT_OUT."""
    if not folder.exists():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        found += _files(path) if path.is_dir() else [path] if path.name not in LEFT_OUT else []
    return found


def _digests(folder: epath.Path, files: list[epath.Path]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 by the name below `folder`."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda path: (path.stat().length, _digest(path)), files)
        return {path.relative_to(folder).as_posix(): facts for path, facts in zip(files, found, strict=True)}


def _digest(path: epath.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
