"""Tokens that need no file: an order-1 Markov chain over any vocabulary, made from the seed.

From state s the chain moves to (a_k * s + b_k) mod vocab with probability 1/2, 1/4, 1/8, 1/8 for k = 0..3.
Every a_k is coprime to vocab, so each move permutes the states and all tokens are equally frequent: a unigram
model learns nothing (ln vocab nats per token), one that sees a token back can reach 1.75 bits = 1.213 nats.
"""

import math
from collections.abc import Iterator

import numpy as np

_CHAINS, _LENGTH = 1024, 1024


def markov_tokens(seed: int, stream: int, vocab_size: int, num_tokens: int) -> Iterator[np.ndarray]:
    """Blocks of token ids (int64, 1-D), `num_tokens` in all; streams of one seed share the moves only.

    Chains are walked side by side, 1024 steps each, which is what lets numpy do the sequential part.
    """
    assert vocab_size >= 2
    factors, offsets = _moves(seed, vocab_size)
    for block in range(-(-num_tokens // (_CHAINS * _LENGTH))):
        rng = np.random.default_rng([seed, 1, stream, block])
        moves = np.array([0, 0, 0, 0, 1, 1, 2, 3])[rng.integers(0, 8, (_LENGTH, _CHAINS))]
        walk = np.empty((_LENGTH, _CHAINS), np.int64)
        state = rng.integers(0, vocab_size, _CHAINS)
        for time in range(_LENGTH):
            walk[time] = state
            state = (factors[moves[time]] * state + offsets[moves[time]]) % vocab_size
        yield walk.T.reshape(-1)[: num_tokens - block * _CHAINS * _LENGTH]


def _moves(seed: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors [4] coprime to the vocabulary and offsets [4]; both below 2**31, so products fit in int64."""
    rng = np.random.default_rng([seed, 0])
    factors = []
    while len(factors) < 4:
        factor = int(rng.integers(1, vocab_size))
        if math.gcd(factor, vocab_size) == 1:
            factors.append(factor)
    return np.array(factors), rng.integers(0, vocab_size, 4)
