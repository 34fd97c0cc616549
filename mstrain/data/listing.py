"""The files of a data.path, and the digest of their contents."""

import difflib
import glob
import hashlib
import itertools
import os
from pathlib import Path

from mstrain.data.compressed import SUFFIXES
from mstrain.data.documents import printable, text_digest
from mstrain.data.file_digests import FileDigests


def listing(path: str, suffixes: tuple[str, ...]) -> tuple[Path, list[str]]:
    """(root, sorted relative names) of a file, of the files below a folder, or of the files that a pattern matches."""
    full = Path(path).expanduser()
    if full.is_file():
        return full.parent, [full.name]
    if glob.has_magic(path) and not full.exists():
        return _matches(full)
    if not full.is_dir():
        siblings = sorted(os.listdir(full.parent)) if full.parent.is_dir() else []
        meant = difflib.get_close_matches(full.name, siblings, n=1)
        hint = f", perhaps {full.parent / meant[0]}" if meant and not full.exists() else ""
        raise ValueError(printable(f"data.path={path} is not a file or folder: type one that exists{hint}"))
    names = walk(full, suffixes, set())
    if not names:
        plain = ["*" + suffix for suffix in suffixes if suffix and not suffix.endswith(SUFFIXES[1:])]
        kinds = " or ".join(plain) or "visible"
        raise ValueError(f"the folder data.path={path} has no {kinds} files: type a data.path= that has")
    return full, names


def _matches(pattern: Path) -> tuple[Path, list[str]]:
    """(root, sorted relative names) of the files that `pattern` matches, `**` any folders; the root has no wildcard."""
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root = Path(*fixed)
    names = glob.glob(str(Path(*pattern.parts[len(fixed) :])), root_dir=root, recursive=True)
    names = sorted(name for name in names if (root / name).is_file())
    if not names:
        raise ValueError(f"data.path={printable(str(pattern))} matches no file: type a pattern that does")
    return root, names


def walk(root: str | Path, suffixes: tuple[str, ...], skipped_folders: set[str]) -> list[str]:
    """Sorted relative POSIX names of regular visible files; links to folders are not followed."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [sub for sub in subfolders if sub not in skipped_folders and not sub.startswith(".")]
        paths = [Path(folder, file) for file in files if file.endswith(suffixes) and not file.startswith(".")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def contents_digest(root: Path, names: list[str], cache: Path) -> str:
    """Hash of the names and contents of files below `root`; reads those that changed since they were last hashed."""
    digests = FileDigests(cache, root if len(names) > 1 else root / names[0])
    found = [_file_digest(digests, root, name) for name in names]
    digests.save()
    return text_digest(*names, *found)


def _file_digest(digests: FileDigests, root: Path, name: str) -> str:
    def compute() -> str:
        with open(root / name, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    try:
        return digests.of(name, lambda: os.stat(root / name), compute)
    except OSError:
        return "unreadable"
