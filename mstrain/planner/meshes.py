"""What mesh=auto means: the meshes of a machine that can run a model, best first by the cost model."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from mstrain.hardware import Chip, TpuSlice, chip_for, collective_seconds, compiler_options, parse_target
from mstrain.hardware.constants import Constants, constants_for
from mstrain.mesh import AXES, MeshShape
from mstrain.models.auto import projections
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import ModelPlan, make_plan
from mstrain.models.transformer import count_parameters
from mstrain.parallel.tune import tune

STATE_BYTES = 16  # per parameter: float32 weight, gradient and two moments
STATE_SHARE = 0.7  # of a device's memory that state may take; activations need the rest


@dataclasses.dataclass(frozen=True)
class MeshCandidate:
    """A mesh with its predicted seconds for the products and gradient sums of one microbatch.

    `roomy`: weights, gradients and moments leave enough of a device's memory for activations.
    """

    shape: MeshShape
    seconds: float
    roomy: bool


def best_meshes(
    parallel: ParallelConfig, model: ModelConfig, microbatch: int, seq: int, devices: int,
    machine: Chip | TpuSlice,
) -> list[MeshCandidate]:
    """The meshes of `rank_meshes` on which the model's plan is legal.

    Raises ValueError when none is, as the best one's plan does.
    """
    refusals, legal = [], []
    for candidate in rank_meshes(model, microbatch * seq, devices, machine):
        try:
            plan_on(candidate.shape, parallel, model, microbatch, seq, _chip(machine))
        except ValueError as error:
            refusals.append(error)
        else:
            legal.append(candidate)
    if not legal:
        raise refusals[0]
    return legal


def plan_on(
    shape: MeshShape, parallel: ParallelConfig, model: ModelConfig, microbatch: int, seq: int,
    chip: Chip | None,
) -> ModelPlan:
    """The plan on a mesh without devices; raises ValueError when it is illegal."""
    return make_plan(parallel, model, AbstractMesh(shape.sizes, AXES), microbatch, seq, chip)


def rank_meshes(model: ModelConfig, tokens: int, devices: int, machine: Chip | TpuSlice) -> list[MeshCandidate]:
    """Every data x row x col mesh of `devices`, roomy ones first, then by time.

    Of a `TpuSlice` those that its torus carries; more than one copy of the model only where that is roomy.
    Data parallelism adds an all-reduce of each device's share of the gradients, counted as exposed. Raises
    ValueError when no mesh can shard the products.
    """
    constants, hbm = constants_for(machine), _chip(machine).hbm_bytes
    state, found, faults = STATE_BYTES * count_parameters(model), [], []
    for data in (d for d in range(1, devices + 1) if devices % d == 0 and tokens % d == 0):
        share = devices // data
        roomy = not hbm or state / share <= STATE_SHARE * hbm
        if data > 1 and not roomy:
            break
        try:
            meshes = machine.mesh_shapes(data) if isinstance(machine, TpuSlice) else None
            tuning = tune(projections(model, model.layers), tokens // data, share, constants, meshes=meshes)
        except ValueError as error:
            faults.append(error)
            continue
        summing = _gradient_seconds(count_parameters(model) / share, data, constants)
        for candidate in tuning.candidates:
            shape = MeshShape(data, candidate.rows, candidate.cols)
            found.append(MeshCandidate(shape, candidate.seconds + summing, roomy))
    if not found:
        raise faults[0]
    best = {}
    for candidate in sorted(found, key=lambda c: (not c.roomy, c.seconds)):
        best.setdefault(candidate.shape, candidate)
    return list(best.values())


def _gradient_seconds(parameters: float, data: int, constants: Constants) -> float:
    """Seconds to sum float32 gradients of a device's parameters over `data` copies."""
    shard = 4 * parameters / data
    scatter = collective_seconds(constants.row.reduce_scatter, shard, data)
    return scatter + collective_seconds(constants.row.all_gather, shard, data)


def _chip(machine: Chip | TpuSlice) -> Chip:
    return machine.chip if isinstance(machine, TpuSlice) else machine


def tpu_slice_of(devices: Sequence) -> TpuSlice | None:
    """The TPU slice that JAX's `devices` are, by their kind and places; None for anything else.

    Torus axes are sorted by length, as in the names of slices; their order does not matter to a mesh.
    """
    chip = chip_for(devices[0].device_kind)
    if chip is None or chip.tpu_slices is None:
        return None
    extents = [max(axis) - min(axis) + 1 for axis in zip(*(device.coords for device in devices), strict=True)]
    topology = "x".join(map(str, sorted(sorted(extents)[-chip.torus_rank :])))
    try:
        tpu_slice = parse_target(f"{chip.tpu_slices.prefixes[0]}:{topology}")
    except ValueError:
        return None
    return tpu_slice if tpu_slice.devices == len(devices) else None


def present_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """The compiler options for a mesh of devices that are here (`mstrain.hardware`)."""
    return compiler_options(chip_for(mesh.devices.flat[0].device_kind))
