"""The memory that an error of XLA reports as exhausted, and how much of it a program needs."""

import re
from typing import NamedTuple

HBM = "hbm"
_SPACE = r"Ran out of memory (?:on|in memory space) (\w+)"
_AMOUNT = r"([\d.]+)([KMGT])"
# Messages of XLA:TPU; the amount of HBM includes arguments and results in all of them.
_NEEDED = (
    rf"total memory required for HLO temporaries \({_AMOUNT}\)",  # before anything has a place
    rf"Used {_AMOUNT} of \S+ \w+",  # when places are given out
    rf"Scoped allocation with size {_AMOUNT}",  # of one kernel in VMEM
)
# The limit beside it: the compiler reserves a part of a device's memory.
_LIMIT = (
    rf"exceeds available HBM \({_AMOUNT}",
    rf"Used \S+ of {_AMOUNT} \w+",
    rf"Scoped allocation with size \S+ and limit {_AMOUNT}",
)


class Exhausted(NamedTuple):
    """A memory by XLA's name (`hbm`, `vmem`), the bytes that are needed and that are available; None where unknown."""

    space: str
    needed: float | None
    limit: float | None


def read_exhausted(error: Exception) -> Exhausted | None:
    """The exhausted memory of an error of XLA, HBM where it names none; None for another error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    space = re.search(_SPACE, text)
    return Exhausted(space[1].lower() if space else HBM, _bytes(text, _NEEDED), _bytes(text, _LIMIT))


def _bytes(text: str, patterns: tuple[str, ...]) -> float | None:
    """Of the first pattern that the message has."""
    match = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
    return float(match[1]) * 1024.0 ** (1 + "KMGT".index(match[2])) if match else None
