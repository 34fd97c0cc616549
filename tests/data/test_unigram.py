"""Entropies against hand computations and against the known statistics of the synthetic chain."""

import math

import numpy as np
import pytest

from mstrain.data import unigram_bits_per_byte, unigram_nats_per_token
from mstrain.data.synthetic import markov_tokens
from mstrain.data.token_file import ANSWER, START

ENTROPY_NATS = 1.75 * math.log(2)  # of the chain where its four moves lead to different states, as nearly always


def test_unigram_entropy_by_hand(make_file):
    # Shares 1/2, 1/4, 1/4 have 1.5 bits per token; at 3 bytes per token that is half a bit per byte.
    file = make_file([7, 7, 2, 9] * 25, 10, text_bytes=300)
    assert unigram_nats_per_token(file) == pytest.approx(1.5 * math.log(2))
    assert unigram_bits_per_byte(file) == pytest.approx(0.5)
    assert unigram_bits_per_byte(make_file([7, 7, 2, 9])) is None


def test_only_answers_of_conversations_count(make_file):
    flags = [START, 0, ANSWER, ANSWER] * 25
    make_file(flags, 4, name="chats.marks")
    file = make_file([7, 7, 2, 9] * 25, 10, name="chats.bin")
    assert unigram_nats_per_token(file) == pytest.approx(math.log(2))


def test_unigram_counts_add_up_over_blocks(make_file, monkeypatch):
    file = make_file(np.random.default_rng(0).integers(0, 50, 1000) ** 2, 2500)
    whole = unigram_nats_per_token(file)
    monkeypatch.setattr("mstrain.data.unigram._BLOCK", 7)
    assert unigram_nats_per_token(file) == pytest.approx(whole)


def _walk(seed, stream, vocab_size, num_tokens):
    return np.concatenate(list(markov_tokens(seed, stream, vocab_size, num_tokens)))


def test_the_chain_is_uniform_alone_and_predictable_from_one_token_back():
    vocab_size = 64
    walk = _walk(5, 0, vocab_size, 1 << 20)
    pairs = np.bincount(walk[:-1] * vocab_size + walk[1:], minlength=vocab_size**2).reshape(vocab_size, -1)
    share = pairs / pairs.sum()
    single = share.sum(1)
    assert -(single * np.log(single)).sum() == pytest.approx(math.log(vocab_size), abs=1e-3)
    known = share[share > 0]
    conditional = -(known * np.log(known)).sum() + (single * np.log(single)).sum()
    # One in 1024 transitions starts a new walk, which costs about 1024**-1 * (ln 64 + ln 1024) nats.
    assert conditional == pytest.approx(ENTROPY_NATS, abs=0.02)


@pytest.mark.parametrize("vocab_size", [2, 3, 256, 50257, 2**31 - 1])
def test_the_chain_is_deterministic_and_in_range_for_any_vocabulary(vocab_size):
    walk = _walk(1, 0, vocab_size, 3000)
    assert len(walk) == 3000 and walk.min() >= 0 and walk.max() < vocab_size
    np.testing.assert_array_equal(walk, _walk(1, 0, vocab_size, 3000))
    assert not np.array_equal(walk, _walk(2, 0, vocab_size, 3000))
    assert not np.array_equal(walk, _walk(1, 1, vocab_size, 3000))
