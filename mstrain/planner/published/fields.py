"""Typed fields of a row; every message names the row and the key."""

import math
from collections.abc import Mapping

MISSING = object()
LARGEST = 10**12


class Fields:
    """One object of a row. `where` names it in messages, such as `row 3 (megatron 1.7B)` and `plan`."""

    def __init__(self, where: str, path: str, values):
        self.where, self.path = where, path
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: {path or 'the row'} is {kind(values)}; write an object.")
        self.values = values

    def error(self, key: str, problem: str) -> ValueError:
        name = f"{self.path}.{key}" if self.path else key
        return ValueError(f"{self.where}: {name} {problem}")

    def _get(self, key: str, default):
        value = self.values.get(key, default)
        if value is MISSING:
            raise self.error(key, "is missing.")
        return value

    def object(self, key: str) -> "Fields":
        value = self._get(key, MISSING)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {kind(value)}; write an object.")
        return Fields(self.where, f"{self.path}.{key}" if self.path else key, value)

    def text(self, key: str, default=MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {kind(value)}; write a text.")
        return value

    def truth(self, key: str, default=MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {kind(value)}; write true or false.")
        return value

    def whole(self, key: str, default=MISSING) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self.error(key, f"is {kind(value)}; write a whole number of 1 or more.")
        return value

    def number(self, key: str, default=MISSING) -> float | None:
        value = self._get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"is {kind(value)}; write a positive number.")
        if not (0 < value <= 1e300 and math.isfinite(value)):
            raise self.error(key, f"is {kind(value)}; write a positive number.")
        return float(value)


def kind(value) -> str:
    """A value as messages show it."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
