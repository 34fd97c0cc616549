"""Every (size, seed, epoch) gives a bijection, and different ones give different orders."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mstrain.data.permutation import permute


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 2**20))
@example(n=1, seed=0, epoch=0)
@example(n=2, seed=0, epoch=0)
@example(n=1024, seed=1, epoch=0)
@example(n=1025, seed=1, epoch=0)
def test_permutation_is_a_bijection(n, seed, epoch):
    np.testing.assert_array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 2**55), seed=st.integers(0, 2**32))
def test_one_index_does_not_depend_on_the_others(n, seed):
    indices = np.unique(np.linspace(0, n - 1, 50).astype(np.int64).clip(0, n - 1))
    together = permute(indices, n, seed, 0)
    alone = np.concatenate([permute(indices[i : i + 1], n, seed, 0) for i in range(len(indices))])
    np.testing.assert_array_equal(together, alone)
    assert together.max() < n and len(np.unique(together)) == len(indices)


def test_seed_and_epoch_both_change_the_order():
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for a in range(3):
        for b in range(a):
            # Two independent permutations agree in about one place, whatever their size.
            assert (orders[a] == orders[b]).sum() < 12


def test_positions_and_images_are_uncorrelated():
    n, seeds = 512, range(200)
    images = np.stack([permute(np.arange(n), n, seed, 0) for seed in seeds])
    # The mean of 200 uniform draws from range(512) has a standard deviation of 10.4: allow 5 of them.
    assert np.abs(images.mean(0) - (n - 1) / 2).max() < 52
    steps = np.diff(images, axis=1)
    assert (np.abs(steps) == 1).mean() < 0.01
