"""Batches reach the devices whole, the same on any mesh; a process reads the rows of its own devices only."""

import jax
import numpy as np
import pytest

from mstrain.data import Batches
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.program.step import abstract_batch
from mstrain.training.feed import Feed

SEQ, BATCH = 8, 16
MESHES = ("1x1", "2x4", "1x8", "2x2x2", "4x2x2", "16x1x1")


class File:
    """A token file in memory."""

    path, vocab_size, marks, eod = "memory", 1000, None, None

    def __init__(self, num_tokens=700):
        self.tokens = np.arange(num_tokens, dtype=np.uint16)
        self.num_tokens = num_tokens

    def rows(self, starts, length):
        return np.stack([self.tokens[start : start + length] for start in starts])


class Recorded(Batches):
    """Remembers which rows were asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = []

    def batch(self, step, rows=slice(None)):
        self.asked.append(tuple(rows))
        return super().batch(step, rows)


def feed_on(mesh: str, accumulate: int = 1, batch: int = BATCH) -> Feed:
    return Feed(Recorded(File(), SEQ, batch, 5), make_mesh(parse_mesh(mesh)), accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_sees_the_same_batches(mesh, accumulate):
    feed, expected = feed_on(mesh, accumulate), Batches(File(), SEQ, BATCH, 5)
    for step in (0, 7):
        batch = feed(step).tokens
        assert batch.shape == (accumulate, BATCH // accumulate, SEQ + 1) and batch.dtype == np.int32
        np.testing.assert_array_equal(np.asarray(batch).reshape(BATCH, -1), expected.batch(step).tokens)


@pytest.mark.parametrize("mesh, shards", [("2x4", 2), ("2x2x2", 4), ("1x8", 1), ("8x1", 8)])
def test_the_rows_of_a_device_are_read_alone_and_once(mesh, shards):
    feed = feed_on(mesh)
    batch = feed(0).tokens
    rows = {shard.index[1].indices(BATCH)[:2] for shard in batch.addressable_shards}
    assert len(rows) == shards
    assert [len(asked) for asked in feed.batches.asked] == [BATCH // shards] * shards
    assert {(asked[0], asked[-1] + 1) for asked in feed.batches.asked} == rows


def test_rows_of_every_microbatch_are_read_together():
    feed = feed_on("2x2x2", accumulate=2)
    feed(3)
    assert (0, 1, 8, 9) in feed.batches.asked  # rows 0-1 of microbatch 0 and of microbatch 1


def test_a_batch_that_divides_over_no_axis_is_replicated():
    batch = feed_on("2x4", batch=5)(0).tokens
    assert batch.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(batch)[0], Batches(File(), SEQ, 5, 5).batch(0).tokens)


def test_abstract_batches_are_those_that_come():
    feed = feed_on("2x2x2", accumulate=2)
    abstract = abstract_batch(make_mesh(parse_mesh("2x2x2")), feed.batches.batch_size, SEQ, 2).tokens
    batch = feed(0).tokens
    assert (batch.shape, batch.dtype, batch.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)
    assert isinstance(batch, jax.Array)


@pytest.mark.parametrize("batch, accumulate, shard", [(8, 2, (2, 1, SEQ + 1)), (6, 1, (1, 3, SEQ + 1))])
def test_sequences_are_sharded_over_copies_and_then_rows_that_divide_them(batch, accumulate, shard):
    tokens = abstract_batch(make_mesh(parse_mesh("2x2x2")), batch, SEQ, accumulate).tokens
    assert tokens.sharding.shard_shape(tokens.shape) == shard


@pytest.mark.parametrize("change, message", [(0.5, "float64 and not integers"), (2**32, "not within a vocabulary")])
def test_tokens_that_would_be_rounded_or_wrapped_are_refused(change, message):
    tokens = np.arange(BATCH * (SEQ + 1)).reshape(BATCH, -1)
    np.testing.assert_array_equal(np.asarray(feed_on("2x4").place(tokens, 1000).tokens)[0], tokens)
    with pytest.raises(ValueError, match=message):
        feed_on("2x4").place(tokens + change, 1000)


def test_a_batch_before_the_first_one_is_an_error():
    with pytest.raises(ValueError, match=r"feed\(-1\): batches are numbered from 0"):
        feed_on("2x4")(-1)
