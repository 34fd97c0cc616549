"""One plan and the layouts of its matrix products: those of train.py, or those of another system."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mstrain.gemm import find_algorithm
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants
from mstrain.layers.latent_attention import LatentPlans
from mstrain.mesh import MeshShape, abstract_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.model_plan import BlockPlan
from mstrain.models.parallel import ParallelConfig, layer_algorithms
from mstrain.models.plan import make_plan
from mstrain.models.products import SHARED, further_products, projections
from mstrain.models.stages import Stages, check_division, even_layers
from mstrain.parallel.dataflow import Projection
from mstrain.parallel.product_cost import Layout
from mstrain.planner.request import PlanRequest


@dataclass(frozen=True)
class PodPlan:
    """Parallel degrees and choices of one plan.

    Attributes:
      data: number of data-parallel replicas.
      parallel: the algorithms of the tensor-parallel products.
      rows, cols: mesh of the tensor-parallel devices; Megatron and FSDP use rows x cols devices as one ring.
      pipeline: number of pipeline stages.
      microbatches: number of microbatches per step and replica.
      remat: activation checkpointing (`mstrain.planner.remat`).
      shard: what is sharded over the replicas, one of `mstrain.planner.request.SHARDS`.
      context: number of parts into which each sequence is split.
      schedule: pipeline schedule, with `interleave` chunks per stage if it is `interleaved`.
      sequence_parallel: whether norms and residuals are sharded over the tensor-parallel devices, as in train.py.
      expert: number of replicas over which the experts of a layer are sharded, a divisor of data.
    """

    data: int
    parallel: ParallelConfig
    rows: int
    cols: int
    pipeline: int = 1
    microbatches: int = 1
    remat: str = "none"
    shard: str = "none"
    context: int = 1
    schedule: str = "1f1b"
    interleave: int = 2
    sequence_parallel: bool = True
    expert: int = 1

    @classmethod
    def on(
        cls, shape: MeshShape, parallel: ParallelConfig, microbatches: int, remat: str, shard: str,
        stages: Stages | None = None,
    ) -> "PodPlan":  # fmt: skip
        """The plan of a step of train.py on a mesh; `stages` describes its pipeline, if it has one."""
        if stages:
            one = cls.on(shape, parallel, microbatches, remat, shard)
            return dataclasses.replace(one, pipeline=stages.count, schedule=stages.schedule, interleave=stages.chunks)
        return cls(
            shape.copies, parallel, shape.row, shape.col, 1, microbatches, remat, shard, shape.context,
            expert=shape.expert,
        )  # fmt: skip

    @property
    def algorithm(self) -> str:
        return self.parallel.algorithm

    @property
    def tensor(self) -> int:
        """Number of tensor-parallel devices."""
        return self.rows * self.cols

    @property
    def replicas(self) -> int:
        """Number of devices with the same weights: data x context."""
        return self.data * self.context

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are sharded over the replicas, and so reduce-scattered once per microbatch."""
        return self.shard in ("gradients", "parameters") and self.replicas > 1

    def sequences(self, batch: int) -> int:
        """Sequences of one microbatch of one replica, for a global batch of `batch` sequences."""
        return batch // self.data // self.microbatches

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sizes of the (stage, data x expert, context, row, col) axes."""
        return self.pipeline, self.data, self.context, self.rows, self.cols

    @property
    def chunks(self) -> int:
        """Chunks of consecutive layers per stage."""
        return self.interleave if self.schedule == "interleaved" and self.pipeline > 1 else 1

    @property
    def name(self) -> str:
        """The degrees in words. Plans with equal names count as one plan, whatever their other choices."""
        context = f", context {self.context}" if self.context > 1 else ""
        expert = f", expert {self.expert}" if self.expert > 1 else ""
        return f"data {self.data}{expert}, {self.tensor_name}{context}, pipeline {self.pipeline}"

    @property
    def tensor_name(self) -> str:
        """The algorithm with its rows and columns, or with the number of devices of its ring."""
        shape = self.tensor if find_algorithm(self.algorithm).one_dimensional else f"{self.rows}x{self.cols}"
        return f"{self.algorithm} {shape}"

    @property
    def shape(self) -> MeshShape:
        """The mesh of one stage."""
        return MeshShape(self.data // self.expert, self.rows, self.cols, context=self.context, expert=self.expert)

    def mesh(self, slices: int = 1) -> MeshShape:
        """The mesh of train.py on `slices` TPU slices, a divisor of data / expert; axis `replica` spans the slices."""
        data = self.data // slices // self.expert
        return dataclasses.replace(self.shape, stage=self.pipeline, replica=slices, data=data)

    def flat(self) -> dict:
        """The plan as a flat dictionary, for CSV and JSON."""
        names = (
            "data", "expert", "algorithm", "rows", "cols", "context", "pipeline", "schedule", "microbatches", "remat",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"interleave": self.chunks, "shard": self.shard}


@dataclass(frozen=True)
class Product:
    """One projection on the mesh.

    Attributes:
      layout: the projection with its dataflow and its rows and columns.
      slices: number of slices (MeshSlice).
      turned: whether the rows of the layout are the columns of the mesh.
      program: the algorithm whose compiled program computes the product.
    """

    layout: Layout
    slices: int
    turned: bool = False
    program: str = "collective"

    @property
    def name(self) -> str:
        return self.layout.projection.name

    @property
    def gathered_bytes(self) -> float:
        """Bytes of all-gathered matrices on one device: of at most two slices at a time."""
        layout = self.layout
        col, row = layout.moving_bytes()
        whole = (col / layout.rows if layout.cols > 1 else 0) + (row / layout.cols if layout.rows > 1 else 0)
        return whole * min(2, self.slices) / self.slices


@dataclass(frozen=True)
class Products:
    """The matrix products of all layers and of the output projection.

    Attributes:
      groups: groups of layers with equal layouts: the products of one layer, and the group's fraction of the layers.
      head: the output projection.
      parts: number of parts into which attention splits every sequence.
      exchange: how these parts exchange keys and values: `ring` or `gather`.
      expert_slices: number of slices in which tokens are exchanged between the devices of their experts.
      first: products of a dense layer, for a model with experts whose first layers are dense; `groups` then covers the
        other layers.
    """

    groups: tuple[tuple[tuple[Product, ...], float], ...]
    head: Product
    parts: int = 1
    exchange: str = "ring"
    expert_slices: int = 1
    first: tuple[Product, ...] = ()

    @cached_property
    def kinds(self) -> tuple["Products", ...]:
        """The products of each group of `PlanRequest.layer_groups`."""
        if not self.first:
            return (self,)
        others = dataclasses.replace(self, first=())
        return dataclasses.replace(others, groups=((self.first, 1.0),)), others

    @property
    def block(self) -> tuple[Product, ...]:
        """The products of a layer of the first of `groups`."""
        return self.groups[0][0]

    @property
    def by_name(self) -> dict[str, Product]:
        """The products of `block` by name."""
        return {product.name: product for product in self.block}

    @cached_property
    def gathered_bytes(self) -> float:
        """The largest `Product.gathered_bytes` of any product of a layer."""
        blocks = self.first, *(block for block, _ in self.groups)
        return max(product.gathered_bytes for block in blocks for product in block)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one replica (on one context part of it)."""
        return self.head.layout.tokens


def plan_products(request: PlanRequest, plan: PodPlan) -> Products | str:
    """The products of one microbatch of one replica on the mesh of a plan; for an illegal plan, the reason as a string.

    For train.py, `mstrain.models.plan` checks the plan and chooses dataflows and slice counts. For another system, the
    tensor-parallel devices are one ring, and its products do not communicate between rows.
    """
    if not request.style.native:
        tokens = plan.sequences(request.batch) * request.seq // plan.context
        made = _ring_products(request.model, tokens, plan.tensor, request.element_bytes)
        return dataclasses.replace(made, parts=plan.context)
    if refused := why_not_divided(request, plan):
        return refused
    microbatch = request.batch // plan.microbatches
    constants = request.pod.tuning_constants(plan.sizes, request.dtype)
    return _products(
        request.model, plan.parallel, plan.shape, microbatch, request.seq, request.pod.chip, constants,
        request.element_bytes,
    )  # fmt: skip


def why_not_divided(request: PlanRequest, plan: PodPlan) -> str:
    """The reason why the stages of train.py do not support the layers; empty if they do."""
    if plan.pipeline == 1:
        return ""
    model, chunks = request.model, plan.pipeline * plan.chunks
    stages = Stages(plan.pipeline, plan.schedule, even_layers(model.layers - model.dense_layers, chunks))
    try:
        check_division(stages, layer_algorithms(plan.parallel, model.layers), model)
    except ValueError as error:
        return str(error)
    return ""


@lru_cache(maxsize=1 << 14)
def _products(
    model: ModelConfig, parallel: ParallelConfig, shape: MeshShape, microbatch: int, seq: int, chip: Chip,
    constants: Constants | None, size: int,
) -> Products | str:  # fmt: skip
    dense = min(1, model.dense_layers)
    alike = model if parallel.layers else dataclasses.replace(model, layers=1 + dense, dense_layers=dense)
    try:
        made = make_plan(parallel, alike, abstract_mesh(shape), microbatch, seq, chip, constants)
    except ValueError as error:
        return str(error)
    tokens = made.padded_sequences(microbatch) // shape.copies * seq // shape.context
    kinds = [kind for kind, _ in model.layer_groups]
    first = [_block(kinds[0], block, shape.expert, tokens, size) for block, _ in made.dense]
    groups = tuple(
        (_block(kinds[-1], block, shape.expert, tokens, size), count / (alike.layers - alike.dense_layers))
        for block, count in made.groups
    )
    vocab_size = model.known_vocab_size
    head = Projection("output", made.width.stored, vocab_size + made.vocab_padding(vocab_size))
    block = made.groups[0][0]
    head = _product(head, made.head, tokens, size)
    return Products(groups, head, block.split.parts, block.split.exchange, block.expert_slices, *first)


def _block(model: ModelConfig, block: BlockPlan, expert: int, tokens: int, size: int) -> tuple[Product, ...]:
    """The products of a layer, with the number of experts that one device along axis `expert` has."""
    made = [
        _product(dataclasses.replace(p, experts=p.experts // expert) if p.experts > 1 else p, plan, tokens, size)
        for p, plan in zip(projections(model, sizes=block.sizes), block.products, strict=True)
    ]
    for p in further_products(model, block.sizes):
        plan = block.mlp.into if p.side == "in" else block.mlp.out
        if p.half != SHARED:
            assert isinstance(block.attention, LatentPlans)
            plan = block.attention.up
        made.append(_product(Projection(p.name, p.in_dim, p.out_dim), plan, tokens, size))
    return tuple(made)


@lru_cache(maxsize=1 << 14)
def _ring_products(model: ModelConfig, tokens: int, tensor: int, size: int) -> Products:
    def product(projection: Projection, dataflow: str) -> Product:
        return Product(Layout(projection, tokens, 1, tensor, dataflow, False, size), 1)

    def block(model: ModelConfig) -> tuple[Product, ...]:
        further = tuple(Projection(p.name, p.in_dim, p.out_dim) for p in further_products(model))
        return tuple(
            product(each, "ls" if each.name.endswith(" out") else "os") for each in projections(model) + further
        )

    *first, others = (block(kind) for kind, _ in model.layer_groups)
    vocab_size = tensor * math.ceil(model.known_vocab_size / tensor)
    head = product(Projection("output", model.width, vocab_size), "os")
    return Products(((others, 1.0),), head, 1, "ring", 1, *first)


def _product(projection: Projection, plan, tokens: int, size: int) -> Product:
    # `Layout` swaps rows and columns for "rs" unless its input is transposed; the plan of train.py has swapped them.
    rows, cols, turned = plan.grid.num_rows, plan.grid.num_cols, plan.grid.rows == ("col",)
    layout = Layout(projection, tokens, rows, cols, plan.dataflow, plan.dataflow == "rs", size)
    return Product(layout, plan.slices, turned, plan.program)
