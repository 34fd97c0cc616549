"""The cases of a comparison, model x mesh x algorithm, and their plans."""

import dataclasses

from jax.sharding import Mesh

from mstrain.benchmarks.config import PRODUCTS, BenchmarkConfig
from mstrain.gemm import Plan, PlanPair, find_algorithm
from mstrain.hardware import Chip, TpuSlice
from mstrain.mesh import MeshShape, parse_mesh, shape_of
from mstrain.models.config import ModelConfig
from mstrain.models.plan import BlockPlan, ModelPlan
from mstrain.models.products import projections
from mstrain.models.scheduling import with_scheduling_groups
from mstrain.program.step_config import StepConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """One algorithm on one mesh for one model; `batch` sequences in `accumulate` microbatches."""

    model: ModelConfig
    mesh: MeshShape
    algorithm: str
    batch: int
    accumulate: int = 1

    @property
    def microbatch(self) -> int:
        return self.batch // self.accumulate


def make_cases(config: BenchmarkConfig, meshes: list[MeshShape]) -> list[Case]:
    """All combinations; raises ValueError if an emulated mesh or the batch does not divide."""
    found = []
    for model in config.model_configs:
        for mesh in meshes:
            whole = parse_mesh(config.emulate) if config.emulate else mesh
            shrunk, sequences = shrink(model, config.sequences(whole.devices), whole, mesh)
            for name in config.algorithm_names:
                found.append(Case(shrunk, mesh, name, sequences, config.accumulate))
    return found


def shrink(model: ModelConfig, batch: int, whole: MeshShape, physical: MeshShape) -> tuple[ModelConfig, int]:
    """Model and batch whose activation shards on `physical` have the shapes they would have on `whole`.

    As in the MeshSlice reference, the batch shrinks by the ratio of rows (and data), heads and widths by the ratio of
    columns. A weight shard then has fewer input features, and rings have the length of `physical`. Raises ValueError
    if a size does not divide.
    """
    if whole == physical:
        return model, batch
    here, there = physical.row * physical.copies, whole.row * whole.copies

    def cols(name: str, size: int) -> int:
        return _scaled(name, size, physical.col, whole.col, physical)

    smaller = dataclasses.replace(
        model,
        heads=cols("heads", model.heads),
        num_kv_heads=cols("num_kv_heads", model.num_kv_heads),
        head_dim=model.head_dim,
        width=cols("width", model.width),
        mlp_dim=cols("mlp_dim", model.mlp_dim),
        dense_mlp_dim=model.dense_mlp_dim and cols("dense_mlp_dim", model.dense_mlp_dim),
        vocab_size=-(-model.known_vocab_size * physical.col // whole.col),
    )
    return smaller, _scaled("batch", batch, here, there, physical)


def _scaled(name: str, size: int, part: int, whole: int, physical: MeshShape) -> int:
    scaled, rest = divmod(size * part, whole)
    if rest or not scaled or part > whole:
        raise ValueError(
            f"emulate: {name} {size} cannot shrink to {part}/{whole} of it for mesh {physical}. Choose "
            "meshes= with fewer rows and columns that divide those of emulate=, or another batch=."
        )
    return scaled


def step_of(case: Case, config: BenchmarkConfig, mesh: Mesh, dtype) -> StepConfig:
    """The training step of a case; `shard` is none on a mesh without data parallelism."""
    step = config.step_config(case.model, case.batch, config.parallel(case.algorithm), dtype)
    return step if mesh.shape["data"] * mesh.shape["context"] > 1 else dataclasses.replace(step, shard="none")


def plan_case(case: Case, config: BenchmarkConfig, mesh: Mesh, machine: Chip | TpuSlice | None, dtype) -> ModelPlan:
    """The plan of a case on a mesh with the configured slice counts; raises ValueError if it is illegal.

    `machine` has the devices of the mesh; None if they are unknown.
    """
    plan = step_of(case, config, mesh, dtype).plan(mesh, machine)
    if config.slice_counts is None or not find_algorithm(case.algorithm).sliced:
        return plan
    counts = dict(zip(PRODUCTS, config.slice_counts, strict=True))
    sequences = plan.padded_sequences(case.microbatch) // shape_of(mesh).copies
    groups = tuple((_sliced(block, counts, case.model, sequences), count) for block, count in plan.groups)
    return with_scheduling_groups(dataclasses.replace(plan, groups=groups), case.model)


def products(block: BlockPlan) -> dict[str, Plan]:
    """The products of a block by name."""
    return dict(zip(PRODUCTS, block.products, strict=True))


def _sliced(block: BlockPlan, counts: dict[str, int], model: ModelConfig, sequences: int) -> BlockPlan:
    plans = {name: dataclasses.replace(plan, slices=counts[name]) for name, plan in products(block).items()}
    for projection in projections(model, sizes=block.sizes):
        plans[projection.name].check(projection.in_dim, projection.out_dim, sequences, projection.name)
    pairs = []
    for into, out in (PRODUCTS[:2], PRODUCTS[2:]):
        if plans[into].dataflow == "rs" and counts[into] != counts[out]:
            raise ValueError(
                f"{into} and {out} share one order of sequences under dataflow rs, so they need the same "
                f"slice count. Type {counts[into]} for both."
            )
        pairs.append(PlanPair(plans[into], plans[out]))
    attention, mlp = pairs
    return BlockPlan(attention, mlp, block.sizes)


def describe(block: BlockPlan) -> str:
    """Dataflows and, if one is above 1, slice counts of the products: `os ls os ls S=4 4 8 4`."""
    return describe_plans(*block.products)


def describe_plans(*plans: Plan) -> str:
    text = " ".join(plan.dataflow for plan in plans)
    if any(plan.slices > 1 for plan in plans):
        text += " S=" + " ".join(str(plan.slices) for plan in plans)
    return text
