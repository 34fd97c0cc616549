"""The loss of the best model without context, a baseline for trained models."""

import numpy as np

from mstrain.data.token_file import TokenFile

_BLOCK = 1 << 22


def unigram_nats_per_token(file: TokenFile) -> float:
    """Entropy of the file's own token frequencies, nats per token: the minimum loss of unigram models."""
    counts = np.zeros(file.vocab_size, np.int64)
    for start in range(0, file.num_tokens, _BLOCK):
        counts += np.bincount(file.read(start, start + _BLOCK), minlength=file.vocab_size)
    share = counts[counts > 0] / file.num_tokens
    return float(-(share * np.log(share)).sum())


def unigram_bits_per_byte(file: TokenFile) -> float | None:
    """The same entropy in bits per byte of text; None when the tokens were not made from text."""
    return file.bits_per_byte(unigram_nats_per_token(file))
