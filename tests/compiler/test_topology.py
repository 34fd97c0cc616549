"""Meshes over absent devices: which links an axis gets, and what is said when something is missing."""

import importlib.metadata
import os
from types import SimpleNamespace

import numpy as np
import pytest

from mstrain.compiler import machine_for, make_target, predict, topology
from mstrain.compiler.machine import HIGH, LOW, clock, torus_for
from mstrain.compiler.topology import Target, missing_compiler, quiet
from mstrain.hardware import all_chips, parse_target
from tests.compiler.programs import module


def target(name, order, sizes):
    """A target whose devices are numbered by hand: `order` are torus axes (3 is the core), slowest first."""
    tpu_slice = parse_target(name)
    extent = (*tpu_slice.topology, *(1,) * (3 - len(tpu_slice.topology)), tpu_slice.chip.tpu_slices.devices_per_chip)
    grid = np.meshgrid(*[np.arange(extent[a]) for a in order], indexing="ij")
    places = np.stack(grid, -1).reshape(-1, len(order))
    devices = np.empty(len(places), object)
    for i, place in enumerate(places):
        at = dict(zip(order, place.tolist()))
        devices[i] = SimpleNamespace(coords=[at.get(a, 0) for a in range(3)], core_on_chip=at.get(3, 0))
    mesh = SimpleNamespace(
        devices=devices.reshape(sizes),
        axis_names=("data", "row", "col"),
        shape=dict(zip(("data", "row", "col"), sizes)),
    )
    return Target(tpu_slice, mesh)


def rings(found, axis):
    devices = np.moveaxis(np.arange(found.mesh.devices.size).reshape(found.mesh.devices.shape), axis, 0)
    return torus_for(found).rings(devices.reshape(len(devices), -1)[:, 0].tolist())


@pytest.mark.parametrize(("name", "order", "sizes", "row", "col", "steps"), [
    ("v6e:4x8", (0, 1), (1, 4, 8), 1, 1, 7),  # open lines
    ("v6e:16x16", (0, 1), (1, 16, 16), 2, 2, 15),  # both wrap
    ("v5p:2x4x4", (2, 0, 1), (1, 4, 8), 1, 2, 1 + 3),  # an open block of 2 x 4: its corners have two links
    ("v5p:8x8x4", (1, 2, 0), (1, 32, 8), 4, 2, 7),
    ("v5p:8x8x4", (0, 1, 2), (1, 64, 4), 4, 2, 3),
    ("v6e:16x16", (0, 1), (1, 32, 8), 4 / 8, 1, 7),  # half a torus axis is an open line, and the other half shares it
    ("v6e:16x16", (0, 1), (2, 8, 16), 1, 2, 15),
    ("tpu7x:2x2x4", (2, 0, 1, 3), (1, 4, 8), 1 / 2, 2, 1 + 1 + 1),  # of a chip, whose two devices are neighbors in col
])  # fmt: skip
def test_links_follow_from_the_places_of_the_devices(name, order, sizes, row, col, steps):
    found = target(name, order, sizes)
    assert (rings(found, 1).links, rings(found, 2).links) == (row, col)
    assert rings(found, 2).steps == steps


def test_neighbors_three_chips_apart_share_the_links_between():
    spread = target("v6e:4x8", (1, 0), (1, 8, 4))
    spread.mesh.devices = spread.mesh.devices[:, ::4, :]
    assert rings(spread, 1).links == 1 / 4


def test_the_machine_takes_bandwidth_from_the_table_a_chip():
    assert machine_for(target("v5p:2x4x4", (2, 0, 1), (1, 4, 8))).link.permute.bandwidth == 9e10
    machine = machine_for(target("tpu7x:2x2x4", (2, 0, 1, 3), (1, 4, 8)))
    assert machine.link.all_gather.bandwidth == 9e10  # 4.5e10 for each of two devices
    assert machine.axes == {"data": 1, "row": 4, "col": 8}


def test_the_bounds_move_only_what_is_unknown():
    found = target("v6e:4x8", (0, 1), (1, 4, 8))
    low, expected, high = machine_for(found, LOW), machine_for(found), machine_for(found, HIGH)
    assert low.link.all_gather.sync < expected.link.all_gather.sync < high.link.all_gather.sync
    assert low.hbm_bandwidth >= expected.hbm_bandwidth > high.hbm_bandwidth
    assert low.kernels.overlap > expected.kernels.overlap > high.kernels.overlap
    assert (low.clock, low.kernels.flops) == (high.clock, high.kernels.flops)
    assert (low.in_order, expected.in_order, high.in_order) == (False, True, True)


def test_a_prediction_lies_between_its_bounds():
    gather = "ROOT %f = bf16[512,64]{1,0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    text = module(f"%x = bf16[64,64]{{1,0}} parameter(0)\n{gather}")
    program = SimpleNamespace(text=text, target=target("v6e:4x8", (0, 1), (1, 4, 8)), memory=None)
    schedule = predict(program)
    low, high = schedule.bounds
    assert 0 < low < schedule.seconds < high


@pytest.mark.parametrize(
    ("name", "gigahertz"),
    [("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.2), ("v3", 0.94), ("v2", 0.7)],
)
def test_clocks_are_the_published_ones(name, gigahertz):
    assert clock(all_chips()[name]) == pytest.approx(1e9 * gigahertz, rel=0.02)


def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(topology.importlib.metadata, "version", absent)
    topology.tpu_slice_devices.cache_clear()
    with pytest.raises(ValueError, match=r"libtpu, which is not installed. Type: pip install \"jax\[tpu\]=="):
        make_target("v5p-64", "4x8")


def test_a_compiler_that_jax_cannot_read_is_refused(monkeypatch):
    wanted = ['libtpu==0.0.42.*; extra == "tpu"']
    monkeypatch.setattr(topology.importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(topology.importlib.metadata, "version", lambda name: "0.0.420")
    assert "libtpu 0.0.420 is not the one" in missing_compiler()
    monkeypatch.setattr(topology.importlib.metadata, "version", lambda name: "0.0.42.1")
    assert missing_compiler() is None


def test_sizes_that_do_not_match_name_those_that_do():
    with pytest.raises(ValueError, match="mesh=row3-col8 does not divide the 32 devices of v5p-64.*mesh=row4-col8"):
        make_target("v5p-64", "3x8")


def test_quiet_swallows_what_c_writes_and_gives_the_streams_back(capfd):
    with quiet():
        os.write(1, b"chatter")
        os.write(2, b"chatter")
    os.write(2, b"heard")
    assert capfd.readouterr() == ("", "heard")


@pytest.mark.parametrize(("name", "mesh", "sizes"), [
    ("v5p-64", "4x8", (1, 4, 8)), ("v5p-128", "2x4x4", (4, 4, 4)), ("v5p:8x8x4", "32x8", (1, 32, 8)),
    ("v5p:8x8x4", "16x16", (1, 16, 16)), ("v6e-256", "16x16", (1, 16, 16)), ("v4-64", "4x8", (1, 4, 8)),
    ("tpu7x:2x2x4", "4x8", (1, 4, 8)), ("v6e-32", "2x4x2", (4, 4, 2)), ("2xv5p-16", "replica2-row2-col4", (1, 2, 4)),
])  # fmt: skip
def test_meshes_of_the_real_compiler(tpu_compiler, capfd, name, mesh, sizes):
    topology.tpu_slice_devices.cache_clear()
    found = make_target(name, mesh)
    assert tuple(found.mesh.shape[axis] for axis in ("data", "row", "col")) == sizes
    assert len({device.id for device in found.mesh.devices.flat}) == found.tpu_slice.devices
    assert capfd.readouterr() == ("", "")
