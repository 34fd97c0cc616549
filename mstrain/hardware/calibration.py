"""Calibration files: measured times of the devices present, which `bench=calibrate` writes and predictions read.

The name of every number contains its unit. Times are those of one device while all devices of the mesh do the same
work, so times of emulated devices include the effect of sharing CPU cores.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstrain.fields import Fields
from mstrain.hardware.chips import chip_for, jax_name
from mstrain.hardware.constants import COLLECTIVES, AxisLinks, Constants, constants_for, load_constants
from mstrain.hardware.gemm_times import GemmTime
from mstrain.hardware.link import Link
from mstrain.json_files import read_json, write_json

FORMAT, VERSION = "mstrain-calibration", 2
KINDS = (*COLLECTIVES, "all_reduce")
AXES = ("row", "col")
TEXTS = ("device_kind", "platform", "dtype", "jax", "date", "source")
_LINK = {"launch": "launch_seconds", "sync": "sync_seconds", "bandwidth": "bandwidth_bytes_per_second"}


@dataclass(frozen=True)
class KernelTime:
    """Seconds of an element-wise kernel; `bytes` is the sum of bytes that it reads and writes."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Measured times of one kind of device.

    Attributes:
      device_kind, platform: as JAX names them.
      devices: number of devices that ran at the same time.
      dtype: dtype of the products, as JAX names it.
      jax: version of JAX.
      date: ISO 8601, UTC.
      source: description of the measurement.
      dispatch_seconds: time to start a program on all devices.
      argument_seconds: additional time of each argument or result.
      exponential_seconds, reduction_seconds, transpose_seconds: per element, in addition to the memory traffic.
      step_ratio: measured time of a small training step over the sum of its instructions' times, each measured in a
        loop: in a step, cold caches, new pages of memory and waiting threads add time. 1 if not measured.
      kernels: element-wise kernels in ascending order of bytes; the time of the first one is that of its launch.
      gemm: products on a full grid of shapes.
      links: a `Link` for each of `KINDS`, by mesh axis; empty if one device was measured.
    """

    device_kind: str
    platform: str
    devices: int
    dtype: str
    jax: str
    date: str
    source: str
    dispatch_seconds: float
    argument_seconds: float
    exponential_seconds: float
    reduction_seconds: float
    transpose_seconds: float
    step_ratio: float
    kernels: tuple[KernelTime, ...]
    gemm: tuple[GemmTime, ...]
    links: dict[str, dict[str, Link]] = dataclasses.field(hash=False)

    @property
    def kernel_launch_seconds(self) -> float:
        return self.kernels[0].seconds

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of the largest element-wise kernel."""
        return self.kernels[-1].bytes / self.kernels[-1].seconds

    def kernel_seconds(self, nbytes: float) -> float:
        """Seconds of an element-wise kernel that reads and writes `nbytes` bytes, interpolated between `kernels`."""
        largest = self.kernels[-1]
        if nbytes > largest.bytes:
            return largest.seconds * nbytes / largest.bytes
        return float(np.interp(nbytes, [k.bytes for k in self.kernels], [k.seconds for k in self.kernels]))

    @property
    def flops(self) -> float:
        """FLOP/s of the fastest product."""
        return max(time.rate for time in self.gemm)

    def check_device(self, device_kinds: tuple[str, ...], path: str | Path) -> None:
        """Raises ValueError if the file was measured on another kind of device than `device_kinds`."""
        if self.device_kind.lower() not in (kind.lower() for kind in device_kinds):
            raise ValueError(
                f"calibration={path} was measured on {self.device_kind}, and the prediction is for "
                f"{' or '.join(device_kinds)}. Measure there: python benchmark.py bench=calibrate."
            )

    def check_dtype(self, dtype: str, path: str | Path) -> None:
        """Raises ValueError if the measured products do not have `dtype` ("bf16", "f32" or JAX's names)."""
        if jax_name(dtype) != self.dtype:
            raise ValueError(
                f"calibration={path} measured products of {self.dtype}, and the prediction is for {dtype}. Measure "
                f"with dtype={'bf16' if jax_name(dtype) == 'bfloat16' else 'f32'}."
            )

    def constants(self, derived: Constants) -> Constants:
        """The constants of the planner's cost model; constants that were not measured are those of `derived`."""
        axes = {
            axis: self.along(axis) if axis in self.links else links
            for axis, links in (("row", derived.row), ("col", derived.col))
        }
        return dataclasses.replace(
            derived, name=f"calibrated {self.device_kind}", source=self.source, flops=self.flops,
            hbm_bandwidth=self.memory_bandwidth, shaped=False, gemm=self.gemm,
            ring=None if self.links else derived.ring, **axes,
        )  # fmt: skip

    def along(self, axis: str) -> AxisLinks:
        """The measured links of mesh axis `axis`."""
        return AxisLinks(*(self.links[axis][kind] for kind in COLLECTIVES))

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `load_calibration` reads."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        document["links"] = {
            axis: {kind: {_LINK[name]: value for name, value in dataclasses.asdict(link).items()}
                   for kind, link in links.items()}
            for axis, links in self.links.items()
        }  # fmt: skip
        write_json(document, path)


def load_calibration(path: str | Path) -> Calibration:
    """Reads a file that `Calibration.save` wrote.

    Raises ValueError for any other file, with the reason and the command that writes a calibration.
    """
    try:
        return parse_calibration(read_json(path, "file"))
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"calibration={path} is not usable: {reason} Make one: python benchmark.py bench=calibrate.")


def read_constants(name_or_path: str | Path) -> Constants:
    """The constants that `constants=` names: a shipped file, a file written by bench=collectives, or a calibration.

    Raises ValueError for any other name or file.
    """
    try:
        document = read_json(name_or_path, "file")
    except ValueError:
        document = None
    if not is_calibration(document):
        return load_constants(name_or_path)
    calibration = load_calibration(name_or_path)
    chip = chip_for(calibration.device_kind)
    if chip is None:
        raise ValueError(f"{name_or_path}: the table of chips has no device kind {calibration.device_kind!r}.")
    return calibration.constants(constants_for(chip, calibration.dtype))


def is_calibration(document: Any) -> bool:
    """Whether a parsed JSON document is a calibration, of any version."""
    return isinstance(document, dict) and document.get("format") == FORMAT


def parse_calibration(document: Any) -> Calibration:
    """The calibration in a parsed JSON document; raises ValueError, with the first invalid entry, if it is invalid."""
    if not is_calibration(document):
        raise ValueError(f'it is not a calibration of mstrain ("format" is not "{FORMAT}").')
    if document.get("version") != VERSION:
        raise ValueError(f"its version is {document.get('version')!r}, and this mstrain reads version {VERSION}.")
    fields = Fields("entry", "", document)
    kernels = tuple(KernelTime(row.whole("bytes"), row.number("seconds")) for row in fields.objects("kernels"))
    gemm = tuple(
        GemmTime(row.whole("m"), row.whole("k"), row.whole("n"), row.number("seconds"))
        for row in fields.objects("gemm")
    )
    if any(a.bytes >= b.bytes for a, b in zip(kernels, kernels[1:])):
        raise fields.error("kernels", "are not in ascending order of bytes.")
    shapes = {(time.m, time.k, time.n) for time in gemm}
    edges = [sorted({shape[i] for shape in shapes}) for i in range(3)]
    if len(shapes) != len(gemm) or len(gemm) != math.prod(map(len, edges)):
        raise fields.error("gemm", "is not a full grid of shapes.")
    links = fields.object("links")
    if links.values and set(links.values) != set(AXES):
        raise fields.error("links", f"are of {', '.join(links.values)} instead of row and col.")
    axes = [(axis, links.object(axis)) for axis in AXES if links.values]
    own: dict[str, Any] = {name: fields.text(name) for name in TEXTS}
    own |= {name: fields.amount(name) for name in Calibration.__dataclass_fields__ if name.endswith("_seconds")}
    return Calibration(
        **own, devices=fields.whole("devices"), step_ratio=fields.number("step_ratio"), kernels=kernels, gemm=gemm,
        links={axis: {kind: _link(each.object(kind)) for kind in KINDS} for axis, each in axes},
    )  # fmt: skip


def _link(fields: Fields) -> Link:
    return Link(fields.amount(_LINK["launch"]), fields.amount(_LINK["sync"]), fields.number(_LINK["bandwidth"]))
