"""The standard error of a predicted step: what each term contributes, and the source of its error (errors.toml)."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

UNMODELED = "unmodeled"  # of errors.toml: relative to the whole step
MEASURED = (0.05, "products measured by bench=calibrate")


@dataclass(frozen=True)
class TermError:
    """The error of one term of a step.

    Attributes:
      name: of the term, or `unmodeled`, which no term covers.
      share: of the step's time; 0 for `unmodeled`.
      relative: standard error of the term, relative to the term (`unmodeled`: to the step).
      unknown, source: what is not known, and where `relative` comes from.
    """

    name: str
    share: float
    relative: float
    unknown: str
    source: str

    @property
    def of_step(self) -> float:
        """Standard error relative to the step."""
        return self.relative * (1.0 if self.name == UNMODELED else self.share)


@functools.cache
def _table() -> dict[str, tuple[float, str, str]]:
    document = tomllib.loads(Path(__file__).with_name("errors.toml").read_text())
    return {name: tuple(entry) for name, entry in document.items()}


def term_errors(seconds: Mapping[str, float], products: tuple[float, str]) -> tuple[TermError, ...]:
    """Errors of the terms of a step, the largest contribution first.

    Args:
      seconds: of every term of the step.
      products: relative standard error of products, and its source.
    """
    total = sum(seconds.values())
    table = {**_table(), "products": (products[0], "rate of large products", products[1])}
    again = table["recomputation"]
    table["recomputation"] = (max(products[0], again[0]), *again[1:])
    found = [TermError(name, seconds.get(name, 0.0) / total, *entry) for name, entry in table.items()]
    return tuple(sorted((each for each in found if each.of_step), key=lambda each: -each.of_step))
