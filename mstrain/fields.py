"""Typed fields of the JSON objects that people hand in; every message names the object and the key."""

from collections.abc import Mapping
from typing import TypeGuard

MISSING = object()
LARGEST = 10**12


class Fields:
    """One object. `where` and `path` name it in messages, such as `row 3 (megatron 1.7B)` and `plan`.

    Methods raise ValueError for a value of another kind, and for a missing one without a default.
    """

    def __init__(self, where: str, path: str, values):
        self.where, self.path = where, path
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: {path or 'it'} is {kind(values)}; write an object.")
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

    def objects(self, key: str) -> list["Fields"]:
        values = self._get(key, MISSING)
        if not isinstance(values, list) or not values:
            raise self.error(key, f"is {kind(values)}; write a list of objects.")
        return [Fields(self.where, f"{self.path}.{key}[{n}]".lstrip("."), each) for n, each in enumerate(values)]

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

    def number(self, key: str, unit: str = "") -> float:
        """A positive number."""
        value = self._get(key, MISSING)
        if not is_number(value) or value == 0:
            raise self.error(key, f"is {kind(value)}; write a positive number{unit and f' of {unit}'}.")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A positive number; None for null and for a missing one."""
        return None if self.values.get(key) is None else self.number(key)

    def amount(self, key: str) -> float:
        """A number of 0 or more."""
        value = self._get(key, MISSING)
        if not is_number(value):
            raise self.error(key, f"is {kind(value)}; write a number of 0 or more.")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers of 0 or more."""
        values = self._get(key, MISSING)
        if not isinstance(values, list) or not values or not all(map(is_number, values)):
            raise self.error(key, f"is {kind(values)}; write a list of numbers of 0 or more.")
        return tuple(values)


def is_number(value) -> TypeGuard[float]:
    """Whether it is a finite number of 0 or more."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e300


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
