"""Tensors of 4 or 8 bits with block scales, dequantized when they are read.

Float8 (DeepSeek-V3, 2024): NAME [out, in] of four bits of exponent and three of mantissa is multiplied by
`NAME_scale_inv`, float32, one for every block of `weight_block_size` elements; the last ones may be smaller.

MXFP4 (OCP Microscaling Formats, 2023), of gpt-oss: 32 consecutive inputs of a kernel share a power of two. A kernel
[E, in, out] is `NAME_blocks` [E, out, in / 32, 16], two numbers a byte, the first in its low half, and `NAME_scales`
[E, out, in / 32].
"""

import functools
import json
from typing import Any

import ml_dtypes
import numpy as np

from mstrain.models.hub.stored import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
BLOCK_SIZE = "weight_block_size"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
_BIAS = 127  # of exponents
SCALE = "_scale_inv"
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def check_quantization(config: Any, known: str | None) -> None:
    """Raises ValueError unless the weights that `quantization_config` of a config.json describes are read.

    They are if the config is None, of the method `known`, or float8 with blocks of two dims.
    """
    if not config:
        return
    method, block = (config.get(key) if isinstance(config, dict) else None for key in ("quant_method", BLOCK_SIZE))
    if method and method == known:
        return
    if method != "fp8":
        raise ValueError("quantization_config: the weights are quantized. Use the folder of the original weights")
    two = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not two or config.get("fmt", "e4m3") != "e4m3":
        raise ValueError(
            f"quantization_config: float8 weights are read with fmt=e4m3 and {BLOCK_SIZE}=[128, 128], or other sizes, "
            f"and this folder has fmt={config.get('fmt')} and {BLOCK_SIZE}={block}. Convert them to bf16 first, by "
            "save_pretrained of transformers"
        )


def dequantized(tensors: dict[str, Tensor], block: tuple[int, int] | None) -> dict[str, Tensor]:
    """`tensors` by name, with every pair of values and scales replaced by the dequantized tensor in bf16.

    `block`: elements of float8 with one scale; None for none of these. Raises ValueError for scales of another shape.
    """
    found = dict(tensors)
    for name, values in tensors.items():
        scales = tensors.get(name + SCALE)
        if block and scales and (values.dtype, scales.dtype, len(values.shape)) == ("F8_E4M3", "F32", 2):
            wanted = tuple(-(-size // step) for size, step in zip(values.shape, block, strict=True))
            if scales.shape != wanted:
                raise ValueError(
                    f"{scales.file}: tensor {scales.name} has shape {list(scales.shape)}, and blocks of {list(block)} "
                    f"in {list(values.shape)} need {list(wanted)}. Download the folder again, or type another init=."
                )
            del found[scales.name]
            found[name] = _Float8(values, scales, block)
    for name, blocks in tensors.items():
        scales = tensors.get(name.removesuffix(BLOCKS) + SCALES)
        if name.endswith(BLOCKS) and scales and blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4:
            plain = name.removesuffix(BLOCKS)
            del found[name], found[plain + SCALES]
            found[plain] = _Mxfp4(blocks, scales, plain)
    return found


class _Float8(Tensor):
    """A kernel [out, in]."""

    def __init__(self, values: Tensor, scales: Tensor, block: tuple[int, int]):
        super().__init__(values.file, values.name, values.shape, "BF16")
        self._scales, self._block = scales, block

    @functools.cached_property
    def _begin(self) -> int:
        """Where the values begin in the file; NumPy has no float8, so safetensors does not read them for it."""
        with self.file.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length + json.loads(file.read(length))[self.name]["data_offsets"][0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        values = np.memmap(self.file, np.uint8, "r", self._begin, self.shape)[index]
        blocks = [np.arange(n)[place] // step for n, place, step in zip(self.shape, index, self._block, strict=True)]
        scales = self._scales.read(tuple(slice(numbers[0], numbers[-1] + 1) for numbers in blocks))
        return _E4M3[values] * scales[np.ix_(*(numbers - numbers[0] for numbers in blocks))]


class _Mxfp4(Tensor):
    """A kernel [E, in, out]."""

    def __init__(self, blocks: Tensor, scales: Tensor, name: str):
        experts, outputs, groups, _ = blocks.shape
        super().__init__(blocks.file, name, (experts, BLOCK * groups, outputs), "BF16")
        self._blocks, self._scales = blocks, scales

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = index
        first, last, _ = inputs.indices(self.shape[1])
        groups = slice(first // BLOCK, -(-last // BLOCK))
        packed = self._blocks.read((experts, outputs, groups, slice(None)))
        exponents = self._scales.read((experts, outputs, groups)).astype(np.int32) - _BIAS
        halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:3], BLOCK)
        values = np.ldexp(_NUMBERS[halves], exponents[..., None]).reshape(*packed.shape[:2], -1)
        start = first - BLOCK * groups.start
        return values[..., start : start + last - first : inputs.step].swapaxes(1, 2)
