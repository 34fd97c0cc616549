"""Fits recover the constants that made the data, and the tuner reads what is written."""

import numpy as np
import pytest

from mstrain.benchmarks.collectives import KINDS, split_axis, time_collective, to_constants
from mstrain.benchmarks.links import Fit, Sample, fit_link
from mstrain.hardware import Link, collective_seconds
from mstrain.hardware.constants import load_constants
from mstrain.mesh import AXES, MeshShape

SIZES = [4**i << 10 for i in range(1, 8)]


def samples(link, participants, noise=0.0):
    random = np.random.default_rng(0)
    return [
        Sample("row", "all_gather", n, size, collective_seconds(link, size, n) * random.lognormal(0, noise))
        for n in participants for size in SIZES
    ]  # fmt: skip


@pytest.mark.parametrize("link", [Link(13e-6, 5e-6, 45e9), Link(100e-6, 6e-6, 60e9), Link(1e-6, 50e-6, 5e9)])
def test_launch_sync_and_bandwidth_come_back(link):
    fit = fit_link(samples(link, [2, 4, 8]))
    assert fit.separable and fit.error < 1e-6
    for name in ("launch", "sync", "bandwidth"):
        assert getattr(fit.link, name) == pytest.approx(getattr(link, name), rel=1e-4)


def test_noise_moves_the_bandwidth_little():
    link = Link(13e-6, 5e-6, 45e9)
    fit = fit_link(samples(link, [2, 4, 8], noise=0.05))
    assert fit.link.bandwidth == pytest.approx(link.bandwidth, rel=0.1)
    assert 0.005 < fit.error < 0.1


def test_one_group_size_cannot_tell_launch_from_sync():
    link = Link(13e-6, 5e-6, 45e9)
    fit = fit_link(samples(link, [4]))
    assert not fit.separable and fit.link.launch == 0
    assert collective_seconds(fit.link, 2**20, 4) == pytest.approx(collective_seconds(link, 2**20, 4))


def test_a_time_that_does_not_grow_has_no_bandwidth():
    flat = [Sample("col", "permute", 2, size, 1e-3 / (i + 1)) for i, size in enumerate(SIZES)]
    with pytest.raises(ValueError, match="permute on col: the time does not grow"):
        fit_link(flat)


def test_the_tuner_reads_the_file(tmp_path):
    row, col = Link(1e-6, 2e-6, 3e9), Link(4e-6, 5e-6, 6e9)
    links = {"row": row, "col": col}
    fits = {(axis, kind): Fit(links[axis], 0.0, True) for axis in links for kind in KINDS}
    constants = to_constants(fits, 1e12, "mine", "a test")
    constants.save(tmp_path / "constants.json")
    assert load_constants(tmp_path / "constants.json") == constants
    assert (constants.row.permute, constants.col.all_gather) == (row, col)


def test_an_axis_of_one_device_takes_the_links_of_the_other():
    fits = {("col", kind): Fit(Link(1e-6, 2e-6, 3e9), 0.0, True) for kind in KINDS}
    assert to_constants(fits, 1e12, "mine", "a test").row.permute == Link(1e-6, 2e-6, 3e9)


@pytest.mark.parametrize(("axis", "group"), [("row", 2), ("col", 2), ("col", 4)])
def test_groups_are_neighbors_along_their_axis(axis, group):
    devices = np.arange(8).reshape(MeshShape(row=2, col=4).sizes)
    mesh_devices = split_axis(devices, axis, group).devices
    along = np.moveaxis(mesh_devices, AXES.index(axis) + 1, -1).reshape(-1, group)
    assert (np.diff(along, axis=1) == {"row": 4, "col": 1}[axis]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_is_timed_on_emulated_devices(kind):
    import jax

    mesh = split_axis(np.array(jax.devices()[:4]).reshape(MeshShape(row=2, col=2).sizes), "col", 2)
    assert 0 < time_collective(mesh, kind, 4096, warmup=1, repeats=1) < 10
