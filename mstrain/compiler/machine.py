"""The machine that a schedule is timed on: rates of a chip, the torus, and ranges of unpublished constants."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from mstrain.compiler.topology import Target
from mstrain.compiler.torus import Torus
from mstrain.gemm.tiles import LANES, SUBLANES
from mstrain.hardware import Chip, Link
from mstrain.hardware.constants import COLLECTIVES, AxisLinks
from mstrain.hardware.link import NETWORK_HOP

# bf16 FLOPs that XLA's cost model lets one device finish in a cycle: MXUs x 128 x 128 (256 x 256 from v6e on)
# x 2, both cores of a v4 or v5p together. With the published peak they give the clock, so that a product at
# the peak and a product at XLA's best estimate take the same time: 1.05 GHz for v4 (the TPU v4 paper says the
# same), 1.5 for v5e ("How to Scale Your Model"), 1.75 for v5p and v6e, 2.2 for tpu7x, 0.7 for v2, 0.94 for v3
# (Jouppi et al., CACM 2020).
FLOPS_PER_CYCLE = {
    "v2": 1 * 2**15, "v3": 2 * 2**15, "v4": 8 * 2**15, "v5e": 4 * 2**15, "v5p": 8 * 2**15, "v6e": 4 * 2**17,
    "tpu7x": 4 * 2**17,
}  # fmt: skip

# (cores, vector ALUs a lane) of a device. A core's vector unit has 8 x 128 lanes, and beside their ALUs one unit for
# transcendental functions, which takes one value a lane and cycle. Two ALUs a lane on v2 and v3 (Norrie et al., IEEE
# Micro 2021) and v4 (128 lanes x 16, Jouppi et al., ISCA 2023), four on v5p ("How to Scale Your Model", TPUs). For
# v5e, v6e and tpu7x nothing is published: assumed equal to v5p.
VECTOR_UNITS = {"v2": (1, 2), "v3": (1, 2), "v4": (2, 2), "v5e": (1, 4), "v5p": (2, 4), "v6e": (1, 4), "tpu7x": (1, 4)}


@dataclasses.dataclass(frozen=True)
class KernelRates:
    """Rates of the units that determine the time of a custom kernel, for which XLA has no estimate.

    Attributes:
      flops: FLOP/s of the matrix units.
      vector: operations a cycle of the vector units.
      exponentials: transcendental functions a cycle.
      matrix_unit: rows and columns of the matrix unit; a narrower product leaves the rest of it idle.
      overlap: share of the work of the less busy units that runs beside the busiest one, 0 to 1.
    """

    flops: float
    vector: float
    exponentials: float
    matrix_unit: int
    overlap: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """What turns a schedule into seconds.

    Attributes:
      name: of the chip, for the picture.
      clock: cycles per second of the TensorCore.
      hbm_bandwidth: bytes/s of one device.
      axes: size of every mesh axis, in the order of the mesh.
      torus: where the devices are.
      link: launch and sync of each kind of collective, and the bandwidth of one link one way.
      kernels: rates for custom kernels.
      in_order: whether a SparseCore finishes a collective before it starts the next one; else collectives that use
        different links run side by side.
    """

    name: str
    clock: float
    hbm_bandwidth: float
    axes: Mapping[str, int]
    torus: Torus
    link: AxisLinks
    kernels: KernelRates
    in_order: bool = False


@dataclasses.dataclass(frozen=True)
class Unknowns:
    """Unpublished constants of these chips: one end, or the middle, of a plausible range.

    Attributes:
      latency: factor on launch and sync times. The table's were fitted on TPU v4; "How to Scale Your Model" gives about
        1 us a hop, a fifth of the fit.
      hbm: share of the published HBM bandwidth that a program reaches.
      overlap: see `KernelRates`. From units that work one after the other (0) to perfectly pipelined ones (1).
      in_order: see `Machine`. Expected, because the compiler calls what it gives a SparseCore a queue. It matters where
        several collectives are in flight on one SparseCore, which the options of the table of chips avoid.
    """

    latency: float
    hbm: float
    overlap: float
    in_order: bool


EXPECTED = Unknowns(latency=1.0, hbm=1.0, overlap=0.5, in_order=True)
LOW = Unknowns(latency=0.2, hbm=1.0, overlap=1.0, in_order=False)
HIGH = Unknowns(latency=2.0, hbm=0.8, overlap=0.0, in_order=True)
NAMES = {"latency": "latency", "hbm": "HBM", "overlap": "attention", "in_order": "SparseCore"}  # in tables


def clock(chip: Chip) -> float:
    """Cycles per second of XLA's estimates for this chip."""
    return chip.known_peak("bf16") / FLOPS_PER_CYCLE[chip.name]


def machine_for(target: Target, unknowns: Unknowns = EXPECTED) -> Machine:
    """The machine on which a program of `target` is timed."""
    chip, mesh = target.tpu_slice.chip, target.mesh
    # The table counts a device: the devices of one chip share its links, each with its part of the bandwidth.
    bandwidth = chip.number("ici_bandwidth") * chip.slice_rules.devices_per_chip
    link = AxisLinks(*(
        Link(unknowns.latency * chip.number(f"launch_{name}"), unknowns.latency * chip.number("sync"), bandwidth)
        for name in COLLECTIVES
    ))  # fmt: skip
    cores, units = VECTOR_UNITS[chip.name]
    lanes = SUBLANES * LANES
    matrix_unit = int(chip.lowering.get("matrix_unit", 128))
    flops = chip.known_peak("bf16")
    kernels = KernelRates(flops, cores * lanes * units, cores * lanes, matrix_unit, unknowns.overlap)
    hbm = unknowns.hbm * chip.number("hbm_bandwidth")
    axes = dict(mesh.shape)
    return Machine(chip.name, clock(chip), hbm, axes, torus_for(target), link, kernels, unknowns.in_order)


def torus_for(target: Target) -> Torus:
    """The places of a target's devices, and the network between its slices.

    Dims of two chips have one link between them, with any wiring.
    """
    tpu_slice = target.tpu_slice
    sizes = (*tpu_slice.topology, tpu_slice.chip.slice_rules.devices_per_chip)
    closed = (*(tpu_slice.wraps and size > 2 for size in tpu_slice.topology), False)
    rank = len(tpu_slice.topology)
    places = [[*device.coords[:rank], device.core_on_chip] for device in target.mesh.devices.flat]
    one = tpu_slice.one.devices
    network = Link(0.0, NETWORK_HOP, tpu_slice.network / one) if tpu_slice.count > 1 else None
    return Torus(sizes, closed, np.array(places), network)
