"""Clock and links of a target, from the table of chips and the places of its devices."""

import numpy as np

from mstrain.compiler.collectives import Machine
from mstrain.compiler.topology import Target
from mstrain.hardware import Chip, Link
from mstrain.hardware.constants import AxisLinks

# bf16 FLOPs that XLA's cost model lets one device finish in a cycle: MXUs x 128 x 128 (256 x 256 from v6e on)
# x 2, both cores of a v4 or v5p together. With the published peak they give the clock, so that a product at
# the peak and a product at XLA's best estimate take the same time: 1.05 GHz for v4 (the TPU v4 paper says the
# same), 1.5 for v5e ("How to Scale Your Model"), 1.75 for v5p and v6e, 2.2 for tpu7x, 0.7 for v2, 0.94 for v3
# (Jouppi et al., CACM 2020).
FLOPS_PER_CYCLE = {
    "v2": 1 * 2**15, "v3": 2 * 2**15, "v4": 8 * 2**15, "v5e": 4 * 2**15, "v5p": 8 * 2**15, "v6e": 4 * 2**17,
    "tpu7x": 4 * 2**17,
}


CORE = 3  # the place of a device is x, y, z of its chip, then its core


def clock(chip: Chip) -> float:
    """Cycles per second of XLA's estimates for this chip."""
    return chip.peak_bf16 / FLOPS_PER_CYCLE[chip.name]


def machine_for(target: Target) -> Machine:
    """The machine on which a program of `target` is timed."""
    chip, mesh = target.tpu_slice.chip, target.mesh
    rings = {axis: axis_rings(target, axis) for axis in mesh.axis_names}
    links = {axis: _axis_links(chip, number * chip.ici_bandwidth) for axis, number in rings.items()}
    return Machine(chip.name, clock(chip), chip.peak_bf16, chip.hbm_bandwidth, dict(mesh.shape), links)


def axis_rings(target: Target, axis: str) -> float:
    """How many links' one-way bandwidth a collective along a mesh axis can use.

    Two where the axis closes a ring of neighbours, so that both directions carry: a whole torus axis of a
    wrapped slice, or a block of two torus axes. One on an open line. Less where neighbours on the axis are
    several chips apart, because their messages share the links between. The devices of one chip share its
    links (the table gives each its part), unless they are neighbours on this axis: then one message at a time
    leaves the chip.
    """
    devices = np.moveaxis(target.mesh.devices, target.mesh.axis_names.index(axis), 0)
    line = devices.reshape(len(devices), -1)[:, 0]
    places = np.array([[*d.coords, d.core_on_chip] for d in line])
    along = [np.unique(column) for column in places.T]
    spread = [dim for dim, values in enumerate(along) if len(values) > 1]
    if not spread:
        return 1.0
    torus = dict(enumerate(target.tpu_slice.topology))
    whole = len(along[spread[0]]) == torus.get(spread[0])
    closed = len(spread) > 1 or (target.tpu_slice.wraps and whole)
    shared = len(along[CORE]) if spread != [CORE] else 1
    return (2.0 if closed else 1.0) * shared / max(int(np.diff(along[dim]).min()) for dim in spread)


def _axis_links(chip: Chip, bandwidth: float) -> AxisLinks:
    return AxisLinks(
        Link(chip.launch_all_gather, chip.sync, bandwidth),
        Link(chip.launch_reduce_scatter, chip.sync, bandwidth),
        Link(chip.launch_permute, chip.sync, chip.ici_bandwidth),
    )
