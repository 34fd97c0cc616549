"""Where the axes of a mesh lie on a torus, against the order in which JAX puts devices, and the links they get."""

import itertools

import numpy as np
import pytest

from mstrain.hardware import parse_target
from mstrain.hardware.chips import chip_named
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.constants import constants_for
from mstrain.hardware.torus_parts import Part, torus_parts
from mstrain.mesh import MeshShape, arrange
from tests.planner.absent import absent_devices

SLICES = ("v6e-256", "v5p-512", "v5p-128", "v5p:8x16x16", "v5e-64")


def found_parts(devices):
    """The parts of torus axes on which `devices` are."""
    places = np.array([device.coords for device in devices])
    used = [(axis, np.unique(column)) for axis, column in enumerate(places.T)]
    return tuple(Part(axis, len(at), int(np.diff(at).min())) for axis, at in used if len(at) > 1)


@pytest.mark.parametrize("name", SLICES)
def test_axes_lie_where_jax_puts_their_devices(name):
    tpu_slice = parse_target(name)
    devices = absent_devices(tpu_slice)
    sizes = [2**n for n in range(len(devices).bit_length())]
    split = 0
    for data, rows in ((data, rows) for data in sizes for rows in sizes if data * rows <= len(devices)):
        shape = MeshShape(data, rows, len(devices) // data // rows)
        mesh = arrange(shape, devices).reshape(shape.data, shape.row, shape.col)
        parts = torus_parts(tpu_slice.physical_axes, (1, shape.data, 1, shape.row, shape.col))
        assert parts is not None
        assert (parts[1], parts[3], parts[4]) == tuple(map(found_parts, (mesh[:, 0, 0], mesh[0, :, 0], mesh[0, 0, :])))
        split += any(part.stride > 1 for part in itertools.chain(*parts))
    assert split  # some of these meshes split a torus axis


def test_sizes_that_are_not_all_devices_have_no_place():
    assert torus_parts((16, 16), (1, 4, 1, 16, 8)) is None
    assert torus_parts((16, 16), (1, 3, 1, 16, 4)) is None
    assert torus_parts((4, 4, 12), (1, 1, 1, 9, 64)) is None


def test_groups_that_alternate_along_an_axis_share_its_links():
    pod, one = find_pod("v6e-256"), constants_for(chip_named("v6e")).row.all_gather
    links = pod.links((1, 4, 1, 16, 4))
    found = [axis.all_gather.bandwidth / one.bandwidth for axis in (links.row, links.col, links.replica)]
    assert found == [2, 1, 0.5]  # a ring; an open line; a ring, of which each of four groups has a quarter
    whole = pod.links((1, 1, 1, 16, 16))
    assert [axis.all_gather.bandwidth / one.bandwidth for axis in (whole.row, whole.col)] == [2, 2]
    assert links.ring and links.ring.all_gather.bandwidth == 3 * one.bandwidth


def test_a_data_axis_may_share_a_torus_axis_with_columns():
    pod = find_pod("v6e-256")
    assert (16, 4) in pod.meshes(4) and (16, 8) in pod.meshes(2)
    assert (32, 8) not in pod.meshes(1) and pod.meshes(1) == ((1, 256), (16, 16), (256, 1))
