"""The loss of the best unigram model (without context), a baseline for trained models."""

from typing import Any

import numpy as np

from mstrain.data.mixture import MixedTokens
from mstrain.data.token_file import ANSWER

_BLOCK = 1 << 22


def unigram_nats_per_token(file: Any) -> float:
    """Entropy of the file's own token frequencies, nats per token: the minimum loss of unigram models.

    Of conversations, only answers count, as in the loss.
    """
    if isinstance(file, MixedTokens):
        parts = zip(file.weights, file.files, strict=True)
        share = np.sum([weight * _shares(part, file.vocab_size) for weight, part in parts], axis=0)
    else:
        share = _shares(file, file.vocab_size)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def _shares(file: Any, vocab_size: int) -> np.ndarray:
    """Frequency of every token of a file that counts in the loss, float64 [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, file.num_tokens, _BLOCK):
        tokens = file.read(start, start + _BLOCK)
        if file.marks:
            tokens = tokens[(file.marks.read(start, start + _BLOCK) & ANSWER) > 0]
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts / max(counts.sum(), 1)


def unigram_bits_per_byte(file: Any) -> float | None:
    """The same entropy in bits per byte of text; None when the tokens were not made from text."""
    return file.bits_per_byte(unigram_nats_per_token(file))
