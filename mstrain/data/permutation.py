"""A pseudo-random permutation of range(n) evaluated at any index in O(1), without storing it.

An unbalanced Feistel network permutes the next power of two; indices that leave range(n) walk along their
cycle until they return (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Fewer than half
of the values are outside, so the expected number of evaluations per index is below two.
"""

from collections.abc import Callable

import numpy as np

CHUNK = 4096  # indices that are permuted at once: the cost of numpy's calls is shared by many small batches
_ROUNDS = 8


def permute(indices: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `indices` (int64, any shape, each in range(n)) under permutation (seed, epoch); int64."""
    assert n >= 1 and (indices.size == 0 or (indices.min() >= 0 and indices.max() < n))
    bits = int(n - 1).bit_length()
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    images = _feistel(indices.astype(np.uint64), bits, keys)
    while (outside := images >= n).any():
        images[outside] = _feistel(images[outside], bits, keys)
    return images.astype(np.int64)


def in_chunks(numbers: np.ndarray, chunk: Callable[[int], np.ndarray]) -> np.ndarray:
    """`chunk(c)[i]` for each of the numbers c * CHUNK + i (int64); int64."""
    found, chunks = np.empty_like(numbers), numbers // CHUNK
    for c in set(chunks.tolist()):
        here = chunks == c
        if here.all():
            return chunk(c)[numbers - c * CHUNK]
        found[here] = chunk(c)[numbers[here] - c * CHUNK]
    return found


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of range(2**bits): alternately xor one half of the bits with a hash of the other."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits // 2)) - np.uint64(1)
    high, low = values >> low_bits, values & low_mask
    for turn, key in enumerate(keys):
        if turn % 2:
            high = high ^ (_mix(low ^ key) & high_mask)
        else:
            low = low ^ (_mix(high ^ key) & low_mask)
    return (high << low_bits) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014); uint64 arithmetic wraps on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
