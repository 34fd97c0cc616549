"""One plan for a pod, and how it computes the products of a block: exactly as train.py does."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import AbstractMesh

from mstrain.gemm import find_algorithm
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants
from mstrain.mesh import AXES, MeshShape
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import ModelPlan, make_plan
from mstrain.models.products import projections
from mstrain.parallel.dataflow import Projection
from mstrain.parallel.product_cost import Layout
from mstrain.planner.request import PlanRequest
from mstrain.planner.target import Pod


@dataclass(frozen=True)
class PodPlan:
    """Parallel degrees and choices of one plan.

    Attributes:
      data: replicas; `sharded`: each keeps a part of the optimizer state (ZeRO stage 1), else all of it.
      parallel: the algorithms of the tensor products; Megatron and FSDP use rows x cols devices as one ring.
      pipeline: stages; microbatches: per step and replica.
      remat: what a layer keeps for its backward pass (train.py's key).
    """

    data: int
    parallel: ParallelConfig
    rows: int
    cols: int
    pipeline: int = 1
    microbatches: int = 1
    remat: str = "none"
    sharded: bool = False

    @property
    def algorithm(self) -> str:
        return self.parallel.algorithm

    @property
    def tensor(self) -> int:
        return self.rows * self.cols

    @property
    def name(self) -> str:
        """What makes plans distinct: everything but microbatches and remat."""
        sharded = " sharded" if self.sharded else ""
        return f"data {self.data}{sharded}, {self.tensor_name}, pipeline {self.pipeline}"

    @property
    def tensor_name(self) -> str:
        """The algorithm, with the mesh it slices or the number of devices in its ring."""
        shape = f"{self.rows}x{self.cols}" if find_algorithm(self.algorithm).sliced else self.tensor
        return f"{self.algorithm} {shape}"

    @property
    def shape(self) -> MeshShape:
        """The mesh of one stage."""
        return MeshShape(self.data, self.rows, self.cols)

    @property
    def mesh(self) -> str:
        return str(self.shape)

    def flat(self) -> dict:
        """Plain columns."""
        plain = {name: getattr(self, name) for name in ("data", "algorithm", "rows", "cols", "pipeline")}
        return {**plain, "microbatches": self.microbatches, "remat": self.remat, "sharded": self.sharded}

    def why_not_trainable(self) -> str:
        """Why train.py cannot run this plan today; empty where it can."""
        if self.pipeline > 1:
            return f"train.py has no pipeline, this plan has {self.pipeline} stages"
        if self.sharded:
            return "train.py keeps the whole optimizer state in every data-parallel copy, this plan shards it"
        return ""


@dataclass(frozen=True)
class Product:
    """One projection as laid out: `layout` says what moves where, `slices` in how many pieces.

    `turned`: the rows of the layout lie along the columns of the mesh. `algorithm`: what computes it; MeshSlice in one
    slice is Collective.
    """

    layout: Layout
    slices: int
    turned: bool = False
    algorithm: str = "collective"

    @property
    def name(self) -> str:
        return self.layout.projection.name


@dataclass(frozen=True)
class Products:
    """The products of groups of equal layers, each with its share of the layers, and the output projection."""

    groups: tuple[tuple[tuple[Product, ...], float], ...]
    head: Product

    @property
    def block(self) -> tuple[Product, ...]:
        """Those of the first layers."""
        return self.groups[0][0]


def plan_on(
    shape: MeshShape, parallel: ParallelConfig, model: ModelConfig, microbatch: int, seq: int, chip: Chip | None,
    constants: Constants | None = None,
) -> ModelPlan:  # fmt: skip
    """The trainer's plan on a mesh without devices; raises ValueError when it is illegal."""
    return make_plan(parallel, model, AbstractMesh(shape.sizes, AXES), microbatch, seq, chip, constants)


def plan_products(request: PlanRequest, plan: PodPlan) -> Products | str:
    """How one replica's part of a microbatch goes through the mesh of a plan; a string says why it cannot.

    The checks, dataflows and slice counts are those of train.py (`mstrain.models.plan`).
    """
    microbatch = request.batch // plan.microbatches
    return _products(
        request.model, plan.parallel, plan.shape, microbatch, request.seq, request.pod, request.element_bytes
    )


@lru_cache(maxsize=1 << 14)
def _products(
    model: ModelConfig, parallel: ParallelConfig, shape: MeshShape, microbatch: int, seq: int, pod: Pod, size: int
) -> Products | str:
    alike = model if parallel.layers else dataclasses.replace(model, layers=1)
    try:
        made = plan_on(shape, parallel, alike, microbatch, seq, pod.chip, pod.measured)
    except ValueError as error:
        return str(error)
    tokens = microbatch // shape.data * seq
    groups = tuple(
        (
            tuple(_product(p, part, tokens, size) for p, part in zip(projections(model), block.products, strict=True)),
            count / alike.layers,
        )
        for block, count in made.groups
    )
    assert model.vocab_size is not None  # the search refuses it
    head = Projection("output", model.width, model.vocab_size + made.vocab_padding(model.vocab_size))
    return Products(groups, _product(head, made.head, tokens, size))


def _product(projection: Projection, plan, tokens: int, size: int) -> Product:
    # The tuner's "rs" swaps rows and columns unless its input arrives transposed; the trainer's plan has done so.
    rows, cols, turned = plan.grid.num_rows, plan.grid.num_cols, plan.grid.rows == ("col",)
    layout = Layout(projection, tokens, rows, cols, plan.dataflow, plan.dataflow == "rs", size)
    algorithm = "collective" if plan.kind.sliced and plan.slices == 1 else plan.algorithm
    return Product(layout, plan.slices, turned, algorithm)
