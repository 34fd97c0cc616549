"""Tensors of 4 bits with scales of blocks, as gpt-oss publishes them, read as the numbers that they stand for.

MXFP4 (OCP Microscaling Formats, 2023): 32 consecutive inputs of a kernel share a power of two. A kernel [E, in, out] is
`NAME_blocks` [E, out, in / 32, 16], two numbers a byte, the first in its low half, and `NAME_scales` [E, out, in / 32].
"""

import numpy as np

from mstrain.models.hub.stored import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
_BIAS = 127  # of exponents


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` by name, every pair of blocks and scales replaced by what they stand for, in bf16 without rounding."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        scales = tensors.get(name.removesuffix(BLOCKS) + SCALES)
        if name.endswith(BLOCKS) and scales and blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4:
            plain = name.removesuffix(BLOCKS)
            del found[name], found[plain + SCALES]
            found[plain] = _Mxfp4(blocks, scales, plain)
    return found


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
