"""What every command does before it imports JAX. It runs with an old Python and without packages, too."""

import gc
import importlib.util
import os
import shlex
import sys

OLDEST = (3, 11)
PACKAGES = ("jax", "flax", "optax", "orbax", "hydra", "numpy", "rich")
"""Packages that every command imports, by the names that they are imported by."""


def start() -> None:
    """Checks the Python and its packages, and sets the threshold of the garbage collector.

    Exits with 2 and a message that says what to type if this Python is too old or packages are missing.
    """
    gc.set_threshold(100_000)  # the objects of imports stay, and to look through them takes 0.2 s
    problem = _problem()
    if problem:
        print(f"mstrain: {problem}", file=sys.stderr)
        sys.exit(2)


def _problem() -> str:
    """What to print if no command can start with this Python; empty if commands can."""
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < OLDEST:
        return f"This is Python {version}, and mstrain needs Python 3.11 or 3.12. {_fix('python3.12')}"
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return ""
    return f"{sys.executable} (Python {version}) lacks packages: {', '.join(absent)}. {_fix('python3')}"


def _fix(python: str) -> str:
    own, words = ".venv/bin/python", sys.argv
    if os.path.basename(words[0]) == "__main__.py":
        words = ["-m", "mstrain", *words[1:]]
    command = " ".join(map(shlex.quote, [own, *words]))
    if os.path.exists(own) and not os.path.samefile(sys.prefix, ".venv"):
        return f"Type {command}"
    return f"Type {python} -m venv .venv && .venv/bin/pip install -r requirements.txt && {command}"
