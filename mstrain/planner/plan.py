"""One plan, and how it computes the products of a block: exactly as train.py does, or as another system states it."""

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
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.products import SHARED, further_products, projections
from mstrain.models.stages import Stages
from mstrain.parallel.dataflow import Projection
from mstrain.parallel.product_cost import Layout
from mstrain.planner.request import PlanRequest


@dataclass(frozen=True)
class PodPlan:
    """Parallel degrees and choices of one plan.

    Attributes:
      data: replicas; `shard`: what each keeps a part of only (`mstrain.planner.request.SHARDS`).
      expert: replicas that divide the experts of a layer among them, a divisor of data.
      parallel: the algorithms of the tensor products; Megatron and FSDP use rows x cols devices as one ring.
      pipeline: stages; schedule: of them, with `interleave` chunks each if it is interleaved.
      microbatches: per step and replica.
      remat: what a layer keeps for its backward pass (`mstrain.planner.remat`).
      context: parts of each sequence. sequence_parallel: whether norms and residuals are sharded over the tensor
        devices, as train.py does.
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
        """The plan of a step of train.py on a mesh, with its `stages` if it has several."""
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
        return self.rows * self.cols

    @property
    def replicas(self) -> int:
        """Devices that hold the same weights: data x context."""
        return self.data * self.context

    @property
    def shards_gradients(self) -> bool:
        """Whether each replica keeps a part of the gradients only, summed once per microbatch."""
        return self.shard in ("gradients", "parameters") and self.replicas > 1

    def sequences(self, batch: int) -> int:
        """Of a microbatch of one replica."""
        return batch // self.data // self.microbatches

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Of the (stage, data x expert, context, row, col) axes."""
        return self.pipeline, self.data, self.context, self.rows, self.cols

    @property
    def chunks(self) -> int:
        """Parts of the model per stage."""
        return self.interleave if self.schedule == "interleaved" and self.pipeline > 1 else 1

    @property
    def name(self) -> str:
        """The degrees, which make plans distinct; microbatches, remat, shard and schedule do not."""
        context = f", context {self.context}" if self.context > 1 else ""
        expert = f", expert {self.expert}" if self.expert > 1 else ""
        return f"data {self.data}{expert}, {self.tensor_name}{context}, pipeline {self.pipeline}"

    @property
    def tensor_name(self) -> str:
        """The algorithm, with its rows and columns or the number of devices in its ring."""
        shape = self.tensor if find_algorithm(self.algorithm).one_dimensional else f"{self.rows}x{self.cols}"
        return f"{self.algorithm} {shape}"

    @property
    def shape(self) -> MeshShape:
        """The mesh of one stage."""
        return MeshShape(self.data // self.expert, self.rows, self.cols, context=self.context, expert=self.expert)

    def mesh(self, slices: int = 1) -> MeshShape:
        """The mesh of train.py over so many TPU slices, which axis `replica` crosses; they divide data / expert."""
        data = self.data // slices // self.expert
        return dataclasses.replace(self.shape, stage=self.pipeline, replica=slices, data=data)

    def flat(self) -> dict:
        """Plain columns."""
        names = (
            "data", "expert", "algorithm", "rows", "cols", "context", "pipeline", "schedule", "microbatches", "remat",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"interleave": self.chunks, "shard": self.shard}


@dataclass(frozen=True)
class Product:
    """One projection on the mesh: its layout, in `slices` slices.

    `turned`: the rows of the layout lie along the columns of the mesh. `program`: the algorithm whose program it is.
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
        """What one device holds of gathered matrices: two slices, or the whole where there is one."""
        layout = self.layout
        col, row = layout.moving_bytes()
        whole = (col / layout.rows if layout.cols > 1 else 0) + (row / layout.cols if layout.rows > 1 else 0)
        return whole * min(2, self.slices) / self.slices


@dataclass(frozen=True)
class Products:
    """The products of groups of equal layers by name, each group with its share of the layers, and the head's.

    `first` are those of the first, dense layers of a model with experts; `groups` are then the others. Attention splits
    every sequence into `parts`, whose keys and values it exchanges by `exchange`. Experts exchange tokens in
    `expert_slices`.
    """

    groups: tuple[tuple[tuple[Product, ...], float], ...]
    head: Product
    parts: int = 1
    exchange: str = "ring"
    expert_slices: int = 1
    first: tuple[Product, ...] = ()

    @cached_property
    def kinds(self) -> tuple["Products", ...]:
        """Those of every group of `PlanRequest.layer_groups`."""
        if not self.first:
            return (self,)
        others = dataclasses.replace(self, first=())
        return dataclasses.replace(others, groups=((self.first, 1.0),)), others

    @property
    def block(self) -> tuple[Product, ...]:
        """Those of the first of `groups`."""
        return self.groups[0][0]

    @property
    def by_name(self) -> dict[str, Product]:
        """Those of the first of `groups`."""
        return {product.name: product for product in self.block}

    @cached_property
    def gathered_bytes(self) -> float:
        """The most that a product of a block gathers on one device."""
        blocks = self.first, *(block for block, _ in self.groups)
        return max(product.gathered_bytes for block in blocks for product in block)

    @property
    def tokens(self) -> int:
        """Of a microbatch of one replica or part of a sequence."""
        return self.head.layout.tokens


def plan_products(request: PlanRequest, plan: PodPlan) -> Products | str:
    """The products of a replica's part of a microbatch on the mesh of a plan; for an illegal plan a string, the reason.

    The checks, dataflows and slice counts of train.py are those of `mstrain.models.plan`. Another system has one ring
    of tensor devices, whose products leave tokens where they are.
    """
    if not request.style.native:
        tokens = plan.sequences(request.batch) * request.seq // plan.context
        made = _ring_products(request.model, tokens, plan.tensor, request.element_bytes)
        return dataclasses.replace(made, parts=plan.context)
    microbatch = request.batch // plan.microbatches
    constants = request.pod.tuning_constants(plan.sizes, request.dtype)
    return _products(
        request.model, plan.parallel, plan.shape, microbatch, request.seq, request.pod.chip, constants,
        request.element_bytes,
    )  # fmt: skip


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
    """The products of a block, with the experts that the devices of one place along axis `expert` have."""
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
    # The tuner's "rs" swaps rows and columns unless its input arrives transposed; the trainer's plan has done so.
    rows, cols, turned = plan.grid.num_rows, plan.grid.num_cols, plan.grid.rows == ("col",)
    layout = Layout(projection, tokens, rows, cols, plan.dataflow, plan.dataflow == "rs", size)
    return Product(layout, plan.slices, turned, plan.program)
