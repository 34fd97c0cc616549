"""What mesh=auto means: the planner's ranking of the plans of one stage, for devices present or absent."""

from collections.abc import Sequence

from mstrain.hardware import Chip, TpuSlice, chip_for, parse_target
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.planner.cost import Costed
from mstrain.planner.request import Fixed, PlanRequest
from mstrain.planner.search import rank_meshes
from mstrain.planner.target import pod_of


def best_meshes(
    parallel: ParallelConfig, model: ModelConfig, batch: int, seq: int, devices: int, machine: Chip | TpuSlice,
    *, accumulate: int = 1, remat: str | None = "none", dtype: str = "bf16",
    shard: str = "none",
) -> list[Costed]:  # fmt: skip
    """The meshes on which the model's plan is legal: those that fit in memory fastest first, then the others.

    `batch`: sequences per step of the whole job; `remat`: None for any. Raises ValueError, with what to type, when none
    is legal.
    """
    fixed = Fixed(microbatches=accumulate, remat=remat, shard=shard)
    return rank_meshes(PlanRequest(model, pod_of(machine, devices), (parallel,), batch, seq, dtype, fixed))


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
