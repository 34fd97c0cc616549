"""Metis profiles: measured times and memory per layer for one device type, tensor parallel degree and batch.

A profile is a file `DeviceType.<TYPE>_tp<T>_bs<S>.json`. Times are milliseconds for forward and backward of
one microbatch of S samples; memory is in MB, parameters in bytes, all per layer.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstrain.json_files import parse_json
from mstrain.planner.mixed.hosts import read_text

FILE_NAME = re.compile(r"DeviceType\.([^_]+)_tp(\d+)_bs(\d+)\.json")
Key = tuple[str, int, int]  # device type, tensor parallel degree, samples per microbatch


@dataclass(frozen=True)
class Profile:
    """One profile file; lists have one entry per layer (embedding, transformer layers, output layer)."""

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
        """Forward and backward time that no layer accounts for."""
        return self.forward_backward_ms - sequential_sum(self.layer_ms)


def sequential_sum(values) -> float:
    """Left-to-right float64 sum. The built-in compensates since Python 3.12, which would change results."""
    return float(np.cumsum(np.asarray(values, np.float64))[-1])


def profile_name(key: Key) -> str:
    device_type, tp, batch = key
    return f"DeviceType.{device_type}_tp{tp}_bs{batch}.json"


def read_profiles(folder: str | Path, device_types=None) -> dict[Key, Profile]:
    """All profiles of a folder, sorted by (type, tp, batch) whatever the order of the directory.

    With `device_types`, other types are skipped and a type without any profile is a ValueError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one of DeviceType.<TYPE>_tp<T>_bs<S>.json files")
    profiles, found = {}, set()
    for path in folder.glob("*.json"):
        match = FILE_NAME.fullmatch(path.name)
        if not match:
            raise ValueError(f"{path}: not a profile name; write DeviceType.<TYPE>_tp<T>_bs<S>.json or move it away")
        key = (match.group(1), int(match.group(2)), int(match.group(3)))
        found.add(key[0])
        if key[1] < 1 or key[2] < 1:
            raise ValueError(f"{path}: tp and bs must be at least 1")
        if device_types is None or key[0] in device_types:
            profiles[key] = _read_profile(path, key)
    for device_type in device_types or ():
        if device_type not in found:
            known = ", ".join(sorted(found)) or "none"
            raise ValueError(
                f"{folder}: no profile of type {device_type}; add DeviceType."
                f"{device_type}_tp1_bs1.json and the others, or use one of these types: {known}"
            )
    if not profiles:
        raise ValueError(f"{folder}: no profiles; add files named DeviceType.<TYPE>_tp<T>_bs<S>.json")
    return {key: profiles[key] for key in sorted(profiles)}


def _read_profile(path: Path, key: Key) -> Profile:
    try:
        document = parse_json(read_text(path, "profile"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg}); profile it again") from None
    times, parameters = ("execution_time",), ("model", "parameters", "parameters_per_layer_bytes")
    profile = Profile(
        *key,
        layer_ms=_field(path, document, *times, "layer_compute_total_ms", many=True),
        layer_mb=_field(path, document, "execution_memory", "layer_memory_total_mb", many=True),
        parameter_bytes=_field(path, document, *parameters, many=True),
        forward_backward_ms=_field(path, document, *times, "forward_backward_time_ms"),
        optimizer_ms=_field(path, document, *times, "optimizer_time_ms"),
        batch_generator_ms=_field(path, document, *times, "batch_generator_time_ms"),
    )
    if min(profile.layer_ms) <= 0:
        raise ValueError(f"{path}: execution_time.layer_compute_total_ms has a time <= 0; profile it again")
    return profile


def _field(path: Path, document, *names: str, many: bool = False) -> Any:
    value = document
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"{path}: field {'.'.join(names)} is missing; add it or profile again")
        value = value[name]
    numbers = value if many else [value]
    wanted = "a list of numbers >= 0, one per layer" if many else "a number >= 0"
    if not isinstance(numbers, list) or not numbers or not all(_is_measure(number) for number in numbers):
        raise ValueError(f"{path}: field {'.'.join(names)} must be {wanted}")
    return tuple(numbers) if many else value


def _is_measure(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def check_layer_times(profiles: dict[Key, Profile], num_layers: int) -> None:
    """ValueError unless every profile has the times of `num_layers` layers."""
    for key, profile in profiles.items():
        _check_length(key, "layer_compute_total_ms", profile.layer_ms, num_layers)


def check_layer_counts(profiles: dict[Key, Profile], num_layers: int) -> None:
    """ValueError unless every profile has `num_layers` layer times, memories and parameter counts."""
    check_layer_times(profiles, num_layers)
    for key, profile in profiles.items():
        _check_length(key, "layer_memory_total_mb", profile.layer_mb, num_layers)
        _check_length(key, "parameters_per_layer_bytes", profile.parameter_bytes, num_layers)


def _check_length(key: Key, name: str, values: tuple, num_layers: int) -> None:
    if len(values) != num_layers:
        raise ValueError(
            f"{profile_name(key)}: {name} has {len(values)} layers, the model has {num_layers}; "
            f"set num_layers={len(values)} or profile that model"
        )
