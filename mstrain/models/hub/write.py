"""Writes parameters as a Hugging Face folder, tensor by tensor, into a temporary folder that is then renamed."""

import contextlib
import dataclasses
import glob
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy then knows bfloat16
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mstrain.layers.experts import BALANCE
from mstrain.models.config import ModelConfig
from mstrain.models.hub.families import MTP_KEYS, Family
from mstrain.models.hub.folder import CONFIG, INDEX, WEIGHTS
from mstrain.models.hub.tensors import Part, parameters_of
from mstrain.models.parameters import STACK, layer_of
from mstrain.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Target:
    """What is written.

    Attributes:
      family: names and orientation of the tensors.
      config: content of config.json, without a dtype.
      dtype_of: name of a tensor -> NumPy's name of its dtype in the folder.
      shard_bytes: largest size of a file of weights that holds more than one tensor.
    """

    family: Family
    config: dict[str, Any]
    dtype_of: Callable[[str], str]
    shard_bytes: int


@contextlib.contextmanager
def new_folder(out: Path, leads: bool) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends without an error, and is removed otherwise.

    Only the process that `leads` makes it. Raises ValueError when `out` exists or cannot be written.
    """
    check_writable(out)
    prefix = f".{out.name}.tmp-{socket.gethostname()}-"
    temporary = out.with_name(f"{prefix}{os.getpid()}")
    absent = [folder for folder in out.absolute().parents if not folder.exists()]
    try:
        if leads:
            _remove_left(out.parent, prefix)
            temporary.mkdir(parents=True)
        yield temporary
        if leads:
            check_writable(out)
            temporary.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"Cannot write out={out} ({reason}). Make room, or type another out=.") from None
    finally:
        if leads:
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # the first one that holds `out`, or something else
                for folder in absent:
                    folder.rmdir()


def _remove_left(place: Path, prefix: str) -> None:
    """Removes the folders that killed exports have left: those whose name ends with the number of no process."""
    for path in place.glob(f"{glob.escape(prefix)}*"):
        try:
            os.kill(int(path.name.removeprefix(prefix)), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OSError):  # not one of ours, or a process of somebody else
            continue


def check_writable(out: Path, size: int = 0) -> None:
    """Raises ValueError when there is something at `out`, or a new folder there cannot hold `size` bytes."""
    if os.path.lexists(out):
        raise ValueError(f"out={out} exists. Remove it, or type another out=.")
    place = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ValueError(f"Cannot write out={out} ({place} is not a folder to write into). Type another out=.")
    if (free := shutil.disk_usage(place).free) < size:
        raise ValueError(f"out={out} takes {size:,} bytes, and its disk has {free:,} left. Type another out=.")


def size_of(model: ModelConfig, target: Target) -> int:
    """Bytes of the tensors of `model`."""
    return sum(_sizes(_all_parts(model, target), target))


def write_model(folder: Path, module: Transformer, params, target: Target, leads: bool) -> int:
    """Writes config.json and weights of `module` with stored `params`; returns the bytes of the tensors.

    All processes call it together; the one that `leads` writes. Host memory is that of one file of weights. Raises
    ValueError for values that are infinite or NaN in their dtype in the folder.
    """
    if (rate := module.model.balance_rate) and f"{STACK}/mlp/{BALANCE}" not in target.family.tensors:
        raise ValueError(
            f"The routers have biases of model.balance_rate={rate:g}, and {target.family.model_type} has no tensor for "
            "them. Train with model.balance_loss=0.01 instead."
        )
    parts = _all_parts(module.model, target)
    sizes = _sizes(parts, target)
    files = _files(sizes, target.shard_bytes)
    names = _file_names(files[-1] + 1)
    places = {part.name: file for part, file in zip(parts, files, strict=True)}
    waiting: dict[str, np.ndarray] = {}
    counts = [files.count(file) for file in range(files[-1] + 1)]
    for name, values in tensors_of(module, params, target):
        if not np.isfinite(values).all():
            raise ValueError(
                f"{name} has values that are not finite as {values.dtype}. Type dtype=f32; if they were not finite "
                "before, type step= of an earlier checkpoint."
            )
        if leads:
            waiting[name] = values
            if len(waiting) == counts[places[name]]:
                save_file(waiting, folder / names[places[name]], metadata={"format": "pt"})
                waiting.clear()
    if leads:
        dtypes = {target.dtype_of(part.source) for part in parts}
        config = {key: value for key, value in target.config.items() if key not in MTP_KEYS}
        config |= {"torch_dtype": dtypes.pop() if len(dtypes) == 1 else "float32"}
        _write_json(folder / CONFIG, config | ({MTP_KEYS[0]: module.model.mtp_layers} if target.family.mtp else {}))
        if len(names) > 1:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": {n: names[f] for n, f in places.items()}}
            _write_json(folder / INDEX, index)
    return sum(sizes)


def tensors_of(module: Transformer, params, target: Target) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the folder by name, one after the other; `params` may be gradients."""
    for parameter in parameters_of(module.model, target.family):
        for layer, parts in enumerate(parameter.layers):
            canonical = layer_of(module, params, parameter.path, layer)
            for part in parts:
                whole = canonical if part.expert is None else canonical[part.expert]
                values = _alternated(whole[..., part.begin : part.end], part.alternating)
                values = values.T if part.transposed else values
                with np.errstate(over="ignore"):  # `write_model` reports what overflows
                    values = np.ascontiguousarray(values, target.dtype_of(part.source))
                yield part.name, values


def _alternated(values: np.ndarray, segments: int) -> np.ndarray:
    """Columns of so many equal segments in turns."""
    if segments == 1:
        return values
    apart = values.reshape(*values.shape[:-1], segments, -1)
    return apart.swapaxes(-1, -2).reshape(values.shape)


def _all_parts(model: ModelConfig, target: Target) -> list[Part]:
    return [part for p in parameters_of(model, target.family) for layer in p.layers for part in layer]


def _sizes(parts: list[Part], target: Target) -> list[int]:
    return [math.prod(part.shape) * np.dtype(target.dtype_of(part.source)).itemsize for part in parts]


def _files(sizes: list[int], limit: int) -> list[int]:
    """The number of the file of each tensor, in order."""
    files, used = [], 0
    for size in sizes:
        full = bool(files) and used + size > limit
        files.append(files[-1] + full if files else 0)
        used = size if full else used + size
    return files


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    stem, suffix = WEIGHTS.split(".")
    return [f"{stem}-{i + 1:05}-of-{count:05}.{suffix}" for i in range(count)]


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
