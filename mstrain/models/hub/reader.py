"""Reads values of a config.json with their types."""

import math
from typing import Any

from mstrain.models.hub.families import Family


class Reader:
    """Values of a config.json; a missing key has the default of its family."""

    def __init__(self, config: dict[str, Any], family: Family):
        self.config, self.family = config, family

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind` or None. Raises ValueError for another type."""
        value = self.config.get(key, self.family.defaults.get(key, default))
        if kind is float and type(value) is int:
            value = float(value)
        if value is None or (type(value) is kind and (kind is not float or math.isfinite(value))):
            return value
        raise ValueError(f"{key}={value!r} is not {'a number' if kind is float else f'of type {kind.__name__}'}")
