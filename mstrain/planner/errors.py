"""The standard error of a predicted step time: the contribution of each term and its source (errors.toml)."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

UNMODELED = "unmodeled"  # entry of errors.toml whose error is relative to the whole step
MEASURED = (0.05, "products measured by bench=calibrate")  # relative standard error, source


@dataclass(frozen=True)
class TermError:
    """The standard error of one term of a step.

    Attributes:
      name: name of the term, or `unmodeled` for effects that no term covers.
      share: fraction of the step's time that the term takes; 0 for `unmodeled`.
      relative: standard error of the term divided by the term (`unmodeled`: divided by the step time).
      unknown: the unknown quantity that causes the error.
      source: source of `relative`.
    """

    name: str
    share: float
    relative: float
    unknown: str
    source: str

    @property
    def of_step(self) -> float:
        """Standard error of the term divided by the step time."""
        return self.relative * (1.0 if self.name == UNMODELED else self.share)


@functools.cache
def _table() -> dict[str, tuple[float, str, str]]:
    document = tomllib.loads(Path(__file__).with_name("errors.toml").read_text())
    return {name: tuple(entry) for name, entry in document.items()}


def term_errors(seconds: Mapping[str, float], products: tuple[float, str]) -> tuple[TermError, ...]:
    """Nonzero errors of the terms of a step, the largest contribution first.

    Args:
      seconds: seconds of each term of the step, by name.
      products: relative standard error of the time of matrix products, and its source.
    """
    total = sum(seconds.values())
    table = {**_table(), "products": (products[0], "rate of large products", products[1])}
    again = table["recomputation"]
    table["recomputation"] = (max(products[0], again[0]), *again[1:])
    found = [TermError(name, seconds.get(name, 0.0) / total, *entry) for name, entry in table.items()]
    return tuple(sorted((each for each in found if each.of_step), key=lambda each: -each.of_step))
