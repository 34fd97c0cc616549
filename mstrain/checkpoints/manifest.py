"""Checksums of a folder's files, written into the folder before it appears under its final name.

Orbax checks that a checkpoint is complete and TensorStore some of its own indices; neither would notice a
flipped bit in an array.
"""

import hashlib
import json
from pathlib import Path

NAME = "manifest.json"
LEFT_OUT = {NAME, "_CHECKPOINT_METADATA"}  # Orbax adds the time of the commit to the latter, and needs it not


def write(folder: Path) -> None:
    """Writes size and SHA-256 of every file under `folder`."""
    files = {path.relative_to(folder).as_posix(): _facts(path) for path in _files(folder)}
    (folder / NAME).write_text(json.dumps({"files": files}, indent=1) + "\n")


def problems(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What differs from the manifest, one sentence each; looks at every `parts`-th file from `part` on.

    A folder without a manifest was half deleted by a run that was killed while it removed old ones, or is
    from elsewhere.
    """
    path = folder / NAME
    if not path.exists():
        return [f"{NAME} is missing: it was half deleted, or not written by mstrain"]
    try:
        files = dict(json.loads(path.read_text())["files"])
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in sorted(files.items())}
    except (ValueError, KeyError, TypeError):
        return [f"{NAME} is damaged"]
    found = []
    for name, (size, digest) in list(expected.items())[part::parts]:
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            found.append(f"{NAME} names a file outside the folder")
        elif not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size} bytes, {size} were written")
        elif _digest(file) != digest:
            found.append(f"{name} has changed since it was written (checksum differs)")
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in LEFT_OUT)


def _facts(path: Path) -> tuple[int, str]:
    return path.stat().st_size, _digest(path)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
