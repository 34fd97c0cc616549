"""Checks of configuration values; messages end with what to type instead."""

import difflib
import re


class TransientError(ValueError):
    """An error that the same command may not meet again: the cause is outside of it, or was repaired."""


def one_of(key: str, value: str, allowed) -> None:
    """Raises ValueError, with the nearest of `allowed`, if `value` is not one of them."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f"Did you mean {key}={near[0]}?" if near else f"Choose one of {', '.join(allowed)}."
        raise ValueError(f"{key}={value} is unknown. {hint}")


def at_least(path: str, config, **bounds) -> None:
    """Raises ValueError for the first field of `config` that is below its bound or NaN.

    `path` is the prefix of the fields on the command line, or empty.
    """
    for name, bound in bounds.items():
        if not getattr(config, name) >= bound:
            key = f"{path}.{name}" if path else name
            raise ValueError(f"{key}={getattr(config, name)} is too small. Type {key}={bound} or more.")


def mounted(key: str, path: str | None) -> None:
    """Raises ValueError if `path` is an address such as gs://bucket/run instead of a folder."""
    if path is not None and (match := re.match(r"([A-Za-z][\w+.-]*):/", path)):
        tool = {"gs": " (gcsfuse mounts gs://)", "s3": " (mount-s3 mounts s3://)"}.get(match[1].lower(), "")
        raise ValueError(
            f"{key}={path} is an address, not a folder: logs, metrics and configurations need a file system. Mount it"
            f"{tool} and type {key}=/mnt/FOLDER."
        )
