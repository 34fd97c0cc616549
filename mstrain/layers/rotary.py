"""Rotary position embedding on halves of the head (Su et al., 2021; halves as in Llama)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

YARN = ("yarn", "yarn-unrounded")
SCALINGS = {"linear": 1, "llama3": 4, **dict.fromkeys(YARN, 5)}  # kinds and their counts of numbers
GLOBAL = 2**30  # window of a layer that attends to all tokens, larger than any sequence


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions of a model.

    Attributes:
      base: base of the frequencies.
      fraction: fraction of a head, from its first feature on, that is rotated.
      scaling: changes the frequencies, `linear:8`, `llama3:8:1:4:8192` or `yarn:32:32:1:4096:1.35`; see
        `check_scaling`.
      alternating: whether a pair are consecutive features, and not those half a width apart (DeepSeek). Their results
        are half a width apart in either case; scores do not depend on the order of features.
      local_base: base in layers with a window, where frequencies are not scaled (Gemma 3); None for `base`.
    """

    base: float
    fraction: float = 1.0
    scaling: str | None = None
    local_base: float | None = None
    alternating: bool = False

    def rotate(self, x_BxTxNxH, window, positions):
        """Rotates the heads of every token by its position, int [T] or [B, T]; `window` (int32) is GLOBAL or the
        layer's."""
        width = rotated_width(x_BxTxNxH.shape[3], self.fraction)
        sin, cos = (x[..., None, :] for x in self._turns(width, window, positions))
        turned, rest = jnp.split(x_BxTxNxH.astype(jnp.float32), [width], axis=-1)
        low, high = (turned[..., ::2], turned[..., 1::2]) if self.alternating else jnp.split(turned, 2, axis=-1)
        rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)
        return rotated.astype(x_BxTxNxH.dtype)

    def rotate_heads(self, x_BxNxTxH, window, positions):
        """`rotate` of [B, N, T, H], not for `alternating`.

        The other feature of every pair comes from a product with a matrix of 0, 1 and -1, which rounds nothing: cuts
        and joins within the 128 lanes of a TPU take several times as long.
        """
        assert not self.alternating
        head_dim, width = x_BxNxTxH.shape[3], rotated_width(x_BxNxTxH.shape[3], self.fraction)
        pad = [(0, 0)] * positions.ndim + [(0, head_dim - width)]
        sin, cos = (
            jnp.pad(jnp.concatenate([x, x], axis=-1), pad, constant_values=rest)
            for x, rest in zip(self._turns(width, window, positions), (0.0, 1.0))
        )
        if positions.ndim == 2:
            sin, cos = sin[:, None], cos[:, None]
        low = np.arange(width // 2)
        other = np.zeros((head_dim, head_dim))
        other[low + width // 2, low], other[low, low + width // 2] = -1, 1
        others = jnp.einsum(
            "bnth,hg->bntg", x_BxNxTxH, other.astype(x_BxNxTxH.dtype), preferred_element_type=jnp.float32
        )
        return (x_BxNxTxH.astype(jnp.float32) * cos + others * sin).astype(x_BxNxTxH.dtype)

    def _turns(self, width: int, window, positions):
        """Sines and cosines of the angle of every pair, [T, width / 2] or [B, T, width / 2]."""
        own, gain = _scaled(_frequencies(self.base, width), self.scaling, self.base)
        frequencies = jnp.asarray(own)
        if self.local_base:
            frequencies = jnp.where(window < GLOBAL, _frequencies(self.local_base, width), frequencies)
            gain = jnp.where(window < GLOBAL, 1.0, gain)
        angles = positions.astype(jnp.float32)[..., None] * frequencies
        return gain * jnp.sin(angles), gain * jnp.cos(angles)


def rotated_width(head_dim: int, fraction: float) -> int:
    """Number of features of a head that are rotated."""
    return int(head_dim * fraction)


def check_scaling(scaling: str | None) -> tuple[str, list[float]]:
    """(kind, numbers) of `linear:FACTOR` (Chen et al., 2023), `llama3:FACTOR:LOW:HIGH:CONTEXT` (Llama 3.1) or
    `yarn:FACTOR:HIGH:LOW:CONTEXT:GAIN` (Peng et al., 2023).

    `linear` divides every frequency by FACTOR. `llama3` divides those with fewer than LOW turns in CONTEXT tokens,
    keeps those with more than HIGH, and interpolates between. `yarn` interpolates linearly in the number of the
    frequency, from bounds that are rounded outward to whole numbers (with `yarn-unrounded`, not), and multiplies
    rotated features by GAIN. Raises ValueError for other text.
    """
    if scaling is None:
        return "none", []
    kind, *numbers = scaling.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) != SCALINGS.get(kind) or not all(0 < value < float("inf") for value in values):
        raise ValueError(
            f"model.rotary_scaling={scaling!r} is unknown. Type linear:FACTOR, llama3:FACTOR:LOW:HIGH:CONTEXT, "
            "yarn:FACTOR:HIGH:LOW:CONTEXT:GAIN or null."
        )
    if kind == "llama3" and values[1] >= values[2]:
        raise ValueError(f"model.rotary_scaling={scaling!r}: LOW must be less than HIGH. Type llama3:8:1:4:8192.")
    if kind in YARN and values[1] <= values[2]:
        raise ValueError(f"model.rotary_scaling={scaling!r}: HIGH must be above LOW. Type {kind}:32:32:1:4096:1.35.")
    return kind, values


def _frequencies(base: float, width: int) -> np.ndarray:
    """Radians per token of every pair of features, float32 [width / 2], rounded as published implementations do."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / np.power(float(base), exponents.astype(np.float64)).astype(np.float32)


def _scaled(frequencies: np.ndarray, scaling: str | None, base: float) -> tuple[np.ndarray, float]:
    """(the frequencies of `scaling`, the factor on rotated features)."""
    kind, numbers = check_scaling(scaling)
    if kind == "linear":
        return frequencies / np.float32(numbers[0]), 1.0
    if kind in YARN:
        factor, *turns, context, gain = numbers
        bounds = [_number_with(n, len(frequencies), base, context) for n in turns]
        low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if kind == "yarn" else bounds
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        ramp = (np.arange(len(frequencies), dtype=np.float32) - low) / (high - low or 0.001)
        share = 1 - np.clip(ramp, 0, 1).astype(np.float32)
        return (1 - share) * frequencies / np.float32(factor) + share * frequencies, gain
    if kind == "llama3":
        factor, low, high, context = numbers
        turns = context * frequencies / (2 * np.pi)
        share = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)  # 1 keeps the frequency
        return (1 - share) * frequencies / np.float32(factor) + share * frequencies, 1.0
    return frequencies, 1.0


def _number_with(turns: float, count: int, base: float, context: float) -> float:
    """The number, a fraction, of that one of `count` frequencies which makes so many turns in `context` tokens."""
    return count * math.log(context / (turns * 2 * math.pi)) / math.log(base)
