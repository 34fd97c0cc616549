"""Sustained fractions of the peaks of devices (efficiency.toml): products by shape, memory, fused attention."""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mstrain.hardware.chips import Chip, element_bytes
from mstrain.hardware.constants import Constants
from mstrain.hardware.gemm_times import gemm_seconds

HEAD = 128  # features per head for which `Efficiency.attention` is stated


@dataclass(frozen=True)
class Efficiency:
    """Sustained fractions of a chip's peaks, and parameters of the time of a product as a function of its shape.

    Attributes:
      matmul, memory, attention, link, network: fractions of the peaks in the table of chips.
      flash2: `attention` of FlashAttention 2, which is slower than kernels for this generation; None if it is not.
      softmax: number of features of a head for which its products take as long as its exponentials.
      tiles: (rows, columns, relative rate) of the thread blocks of a GPU; a TPU has one, its systolic array.
      host: bytes/s to or from host memory, in one direction.
      units: SMs of a GPU; 0 on a TPU, whose products are not rounded up to waves.
      fill: cost of starting a tile, as elements added to the contracted dim.
      launch: seconds between dependent kernels.
      schedule: measured over compiled seconds of a TPU's step.
      overlap: fraction of the time of all-gathers of weights and gradient sums, over replicas of one slice, that
        compute can hide.
      others_overlap: the same in programs of other systems, from measured runs; None if it equals `overlap`.
      network_overlap: the same over several TPU slices.
      elementwise: bytes/s of element-wise work in programs of train.py over those of a long stream, relative to v5p.
      spread: relative standard deviation of the speed of devices of one kind.
      error: relative standard error of `matmul`, and its source.
    """

    matmul: float
    memory: float
    attention: float
    network: float
    tiles: tuple[tuple[int, int, float], ...]
    host: float
    flash2: float | None = None
    softmax: float = 0.0
    link: float = 1.0
    units: int = 0
    fill: int = 0
    launch: float = 0.0
    schedule: float = 1.0
    overlap: float = 1.0
    others_overlap: float | None = None
    network_overlap: float = 1.0
    elementwise: float = 1.0
    spread: float = 0.0
    error: tuple[float, str] = (0.1, "assumed")

    def gemm_seconds(self, chip: Chip, dims: tuple[int, int, int], dtype: str = "bf16", batch: int = 1) -> float:
        """Seconds of `batch` products (m, k) x (k, n): the maximum of arithmetic and memory time, plus the launch."""
        m, k, n = dims
        rate = chip.known_peak(dtype) * self.matmul
        moved = element_bytes(dtype) * batch * (m * k + k * n + m * n)
        arithmetic = min(self._arithmetic(tile, dims, batch) for tile in self.tiles) / rate
        return max(arithmetic, moved / (chip.number("hbm_bandwidth") * self.memory)) + self.launch

    def _arithmetic(self, tile: tuple[int, int, float], dims: tuple[int, int, int], batch: int) -> float:
        """FLOPs with this tile, including padding and idle SMs in the last wave."""
        (rows, columns, relative), (m, k, n) = tile, dims
        count = batch * math.ceil(m / rows) * math.ceil(n / columns)
        if self.units:
            count = self.units * math.ceil(count / self.units)
            summed = k + self.fill
        else:
            summed = rows * math.ceil(k / rows)
        return 2.0 * count * rows * columns * summed / relative

    def hidden_of_replicas(self, slices: int, native: bool) -> float:
        """The fraction of all-gathers and gradient sums over replicas on `slices` TPU slices that compute can hide.

        `native`: whether the program is that of train.py.
        """
        if slices > 1:
            return self.network_overlap
        return self.overlap if native or self.others_overlap is None else self.others_overlap

    def attention_rate(self, chip: Chip, head_dim: int, dtype: str = "bf16", flash2: bool = False) -> float:
        """FLOP/s of a fused attention kernel, or of FlashAttention 2 with `flash2`.

        Heads narrower than a TPU's systolic array use only a part of it. On GPUs, exponentials take a larger fraction
        of the time of narrow heads.
        """
        if flash2 and self.flash2 is not None:
            return chip.known_peak(dtype) * self.flash2
        filled = 1.0 if self.units else min(1.0, head_dim / self.tiles[0][0])
        filled *= (1 + self.softmax / HEAD) / (1 + self.softmax / head_dim)
        return chip.known_peak(dtype) * self.attention * filled


def _efficiency(entry: dict) -> Efficiency:
    numbers = {key: value[0] for key, value in entry.items() if key not in ("chips", "unit", "tiles", "uncertainty")}
    edge = entry.get("unit", [0])[0]
    tiles = entry["tiles"][0] if "tiles" in entry else [[edge, edge, 1.0]]
    return Efficiency(tiles=tuple(map(tuple, tiles)), error=tuple(entry["uncertainty"]), **numbers)


@functools.cache
def _table() -> Mapping[str, Efficiency]:
    document = tomllib.loads(Path(__file__).with_name("efficiency.toml").read_text())
    found = {}
    for platform in document.values():
        for entry in platform.values():
            found |= dict.fromkeys(entry["chips"], _efficiency(entry))
    return MappingProxyType(found)


def efficiency_of(chip: Chip) -> Efficiency:
    """The efficiency of `chip`; raises ValueError, with the chips in the table, if it has none."""
    if chip.name not in _table():
        raise ValueError(f"The table of efficiencies has no {chip.name}. It has {', '.join(_table())}.")
    return _table()[chip.name]


def product_seconds(chip: Chip, constants: Constants, dims: tuple[int, int, int], dtype: str = "bf16") -> float:
    """Seconds of a product (m, k) x (k, n) on one device.

    It is measured (`constants.gemm`), follows from the shape (`constants.shaped`), or has the rate `constants.flops`.
    Raises ValueError if the table of efficiencies lacks the chip.
    """
    if constants.gemm:
        return gemm_seconds(constants.gemm, *dims)
    if constants.shaped:
        return efficiency_of(chip).gemm_seconds(chip, dims, dtype)
    return 2.0 * math.prod(dims) / constants.flops
