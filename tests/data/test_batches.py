"""Batch k depends on (seed, k) alone: not on call order, number of hosts, or what was read before."""

import os

import numpy as np
import pytest

from mstrain.data import Batches, TokenFile


def test_batch_is_a_pure_function_of_seed_and_step(make_file):
    file = make_file(np.arange(5000))
    forward, backward = Batches(file, 16, 4, seed=3), Batches(TokenFile.open(file.path), 16, 4, seed=3)
    steps = range(0, 400, 7)
    expected = {step: forward.batch(step).tokens for step in steps}
    for step in reversed(steps):
        np.testing.assert_array_equal(backward.batch(step).tokens, expected[step])
    assert not np.array_equal(Batches(file, 16, 4, seed=4).batch(0).tokens, expected[0])


def test_a_batch_is_int32_windows_of_consecutive_tokens(make_file):
    batch = Batches(make_file(np.arange(5000)), 16, 4).batch(11).tokens
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(17))
    assert (batch[:, 0] % 16 == 0).all()


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_rows_of_all_hosts_make_the_whole_batch(make_file, hosts):
    batches = Batches(make_file(np.arange(3000)), 10, 8, seed=1)
    for step in (0, 36, 37, 38, 1000):  # 299 windows: step 37 straddles two epochs
        share = 8 // hosts
        parts = [batches.batch(step, slice(host * share, (host + 1) * share)).tokens for host in range(hosts)]
        np.testing.assert_array_equal(np.concatenate(parts), batches.batch(step).tokens)
    np.testing.assert_array_equal(batches.batch(5, np.array([6, 1])).tokens, batches.batch(5).tokens[[6, 1]])


def test_rows_read_only_their_own_windows(make_file, monkeypatch):
    file = make_file(np.arange(3000))
    touched = []

    def pread(descriptor, size, offset):
        touched.append(size)
        return os_pread(descriptor, size, offset)

    os_pread = os.pread
    monkeypatch.setattr(os, "pread", pread)
    Batches(file, 10, 8).batch(2, slice(3, 5))
    assert touched == [22, 22]


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(make_file):
    batches = Batches(make_file(np.arange(2001)), 10, 8)
    assert batches.num_windows == 200 and batches.batches_per_epoch == 25
    steps = [batches.batch(step).tokens[:, 0] for step in range(50)]
    epochs = np.concatenate(steps[:25]), np.concatenate(steps[25:])
    for starts in epochs:
        np.testing.assert_array_equal(np.sort(starts), np.arange(0, 2000, 10))
    assert not np.array_equal(*epochs)


def test_epochs_hold_when_the_batch_does_not_divide_them(make_file):
    batches = Batches(make_file(np.arange(71)), 10, 3)  # 7 windows
    starts = np.concatenate([batches.batch(step).tokens[:, 0] for step in range(7)])
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(starts[7 * epoch : 7 * epoch + 7]), np.arange(0, 70, 10))


def test_sample_order_does_not_depend_on_the_batch_size(make_file):
    file = make_file(np.arange(3000))
    small, large = Batches(file, 10, 4, seed=9), Batches(file, 10, 12, seed=9)
    np.testing.assert_array_equal(
        np.concatenate([small.batch(step).tokens for step in (3, 4, 5)]), large.batch(1).tokens
    )


def test_without_shuffle_windows_come_in_file_order(make_file):
    batches = Batches(make_file(np.arange(100)), 10, 4, shuffle=False)
    starts = np.concatenate([batches.batch(step).tokens[:, 0] for step in range(3)])
    np.testing.assert_array_equal(starts, [0, 10, 20, 30, 40, 50, 60, 70, 80, 0, 10, 20])


def test_a_short_file_names_the_largest_legal_seq(make_file):
    file = make_file(np.arange(100))
    with pytest.raises(ValueError, match="seq=99 or less"):
        Batches(file, 100, 1)
    np.testing.assert_array_equal(Batches(file, 99, 1).batch(7).tokens, [np.arange(100)])


@pytest.mark.parametrize("bad", [{"seq": 0}, {"batch": 0}, {"seed": -1}])
def test_impossible_sizes_are_refused(make_file, bad):
    with pytest.raises(ValueError, match=f"type {next(iter(bad))}="):
        Batches(make_file(np.arange(100)), **{"seq": 10, "batch": 1, **bad})


def test_a_token_outside_the_vocabulary_is_an_error_not_a_clamped_embedding(make_file):
    with pytest.raises(ValueError, match="token id 99, outside its vocabulary of 50"):
        Batches(make_file(np.arange(100), vocab_size=50), 9, 11).batch(0)
