"""Metis profiles: measured times and memory per layer for one device type, tensor-parallel degree and batch.

A profile is a file `DeviceType.<TYPE>_tp<T>_bs<S>.json`. Times per layer are in milliseconds, for the forward and
backward pass of one microbatch of S samples; memory per layer is in MB, parameters per layer are in bytes.
"""

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstrain.fields import Fields
from mstrain.json_files import read_json

FILE_NAME = re.compile(r"DeviceType\.([^_]+)_tp(\d+)_bs(\d+)\.json")
Key = tuple[str, int, int]  # device type, tensor parallel degree, samples per microbatch
# Field of `Profile` -> keys in the file; the values of PER_LAYER are lists.
PER_LAYER = {
    "layer_ms": ("execution_time", "layer_compute_total_ms"),
    "layer_mb": ("execution_memory", "layer_memory_total_mb"),
    "parameter_bytes": ("model", "parameters", "parameters_per_layer_bytes"),
}
SINGLE = {
    "forward_backward_ms": ("execution_time", "forward_backward_time_ms"),
    "optimizer_ms": ("execution_time", "optimizer_time_ms"),
    "batch_generator_ms": ("execution_time", "batch_generator_time_ms"),
}


@dataclass(frozen=True)
class Profile:
    """One profile file; tuples have one entry per layer (embedding, transformer layers, output layer)."""

    device_type: str
    tp: int
    batch: int
    layer_ms: tuple[float, ...]
    layer_mb: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    forward_backward_ms: float
    optimizer_ms: float
    batch_generator_ms: float

    @property
    def sync_ms(self) -> float:
        """Forward and backward time, in ms, that belongs to no layer."""
        return self.forward_backward_ms - sequential_sum(self.layer_ms)


def sequential_sum(values) -> float:
    """Left-to-right float64 sum. The built-in `sum` is compensated since Python 3.12, which would change results."""
    return float(np.cumsum([0.0, *values])[-1])


def profile_name(key: Key) -> str:
    device_type, tp, batch = key
    return f"DeviceType.{device_type}_tp{tp}_bs{batch}.json"


def read_profiles(folder: str | Path, device_types: Collection[str] | None = None) -> dict[Key, Profile]:
    """All profiles of a folder, sorted by (type, tp, batch).

    With `device_types`, profiles of other types are skipped. Raises ValueError for an invalid folder, file name or
    file, and for one of `device_types` without a profile.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; give one of DeviceType.<TYPE>_tp<T>_bs<S>.json files")
    paths: dict[Key, Path] = {}
    for path in Path(folder).glob("*.json"):
        match = FILE_NAME.fullmatch(path.name)
        if not match:
            raise ValueError(f"{path}: not a profile name; write DeviceType.<TYPE>_tp<T>_bs<S>.json or move it away")
        paths[match[1], int(match[2]), int(match[3])] = path
        if not int(match[2]) or not int(match[3]):
            raise ValueError(f"{path}: tp and bs must be at least 1")
    if not paths:
        raise ValueError(f"{folder}: no profiles; add files named DeviceType.<TYPE>_tp<T>_bs<S>.json")
    found = {name for name, _, _ in paths}
    for device_type in device_types or ():
        if device_type not in found:
            raise ValueError(
                f"{folder}: no profile of type {device_type}; add {profile_name((device_type, 1, 1))} "
                f"and the others, or use one of these types: {', '.join(sorted(found))}"
            )
    return {key: _read_profile(paths[key], key) for key in sorted(paths) if key[0] in (device_types or found)}


def _read_profile(path: Path, key: Key) -> Profile:
    document = Fields(str(path), "", read_json(path, "profile"))
    values: dict[str, Any] = {}
    for name, (*objects, last) in (PER_LAYER | SINGLE).items():
        fields = functools.reduce(Fields.object, objects, document)
        values[name] = fields.numbers(last) if name in PER_LAYER else fields.amount(last)
    if min(values["layer_ms"]) <= 0:
        raise ValueError(f"{path}: {'.'.join(PER_LAYER['layer_ms'])} has a time <= 0; profile it again")
    return Profile(*key, **values)


def check_layers(profiles: dict[Key, Profile], num_layers: int, names: Sequence[str]) -> None:
    """Raises ValueError unless the tuples `names` of every profile have `num_layers` entries."""
    for name in names:
        for key, profile in profiles.items():
            if len(getattr(profile, name)) != num_layers:
                count = len(getattr(profile, name))
                raise ValueError(
                    f"{profile_name(key)}: {PER_LAYER[name][-1]} has {count} layers, the model has {num_layers}; "
                    f"set num_layers={count} or profile that model"
                )
