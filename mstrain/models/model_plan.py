"""The plans of a model's products: `BlockPlan` of a layer, `ModelPlan` of all."""

import dataclasses
import math
from collections.abc import Callable

from jax.sharding import AbstractMesh, Mesh

from mstrain.gemm import Grid, Plan, PlanPair, Span
from mstrain.gemm.tiles import LANES
from mstrain.layers.sequence_split import SequenceSplit
from mstrain.mesh import shape_of
from mstrain.models.products import Sizes
from mstrain.models.stages import Stages
from mstrain.models.token_order import TokenOrder


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Plans of the two halves of a block, its features with their padding, how its attention splits sequences, and the
    slices in which its experts exchange tokens."""

    attention: PlanPair
    mlp: PlanPair
    sizes: Sizes
    split: SequenceSplit = SequenceSplit()
    expert_slices: int = 1

    @property
    def products(self) -> tuple[Plan, ...]:
        """The four plans in the order of `mstrain.models.products.block_products`."""
        return tuple(plan for pair in (self.attention, self.mlp) for plan in (pair.into, pair.out))

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices; plans on an abstract mesh have none."""
        return _with_devices(self.attention.grid.mesh)

    @property
    def algorithm(self) -> str | None:
        """The algorithm of all products' programs; None where there are several."""
        return _sole({plan.program for plan in self.products})


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """Plans of consecutive groups of equal layers with their lengths, and of the output projection.

    Attributes:
      dense: the first, dense layers of a model with experts, one group or none; `groups` are the layers after them.
      padded: whether the vocabulary is padded to equal shards; False for canonical parameters.
      shard: one of `mstrain.models.sharding.SHARD`.
      sequence_unit: the sequences of a microbatch of the whole job are padded to a multiple of it.
      stages: the division of the layers over the stages of a pipeline; None for one stage.
      mtp: the product of features and embedding in layers that predict further tokens; None without such layers.
    """

    groups: tuple[tuple[BlockPlan, int], ...]
    head: Plan
    dense: tuple[tuple[BlockPlan, int], ...] = ()
    padded: bool = True
    shard: str = "none"
    sequence_unit: int = 1
    stages: Stages | None = None
    mtp: Plan | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices; plans on an abstract mesh have none."""
        return _with_devices(self.head.grid.mesh)

    @property
    def algorithm(self) -> str | None:
        """The algorithm whose program all products of the layers are, which chooses compiler options; None for several.

        `fsdp` where replicas gather weights, independent of the algorithm of the products.
        """
        return "fsdp" if self.shard == "parameters" else _sole({block.algorithm for block, _ in self.every_group})

    @property
    def every_group(self) -> tuple[tuple[BlockPlan, int], ...]:
        """All groups in the order of the layers."""
        return (*self.dense, *self.groups)

    def with_blocks(self, change: Callable[[BlockPlan], BlockPlan]) -> "ModelPlan":
        """With `change` of the plan of every block."""
        dense, groups = (tuple((change(b), n) for b, n in groups) for groups in (self.dense, self.groups))
        return dataclasses.replace(self, dense=dense, groups=groups)

    @property
    def embedding_grid(self) -> Grid:
        return self.head.grid.swapped if self.head.dataflow == "rs" else self.head.grid

    @property
    def width(self) -> Span:
        """Features of the residual stream."""
        return self.groups[0][0].sizes.width

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The layer in every row of the stack of layers over the stages of a pipeline, -1 for padding; else None."""
        return self.stages.rows if self.stages else None

    @property
    def order(self) -> TokenOrder:
        """The order of the tokens in activations."""
        block, mesh = self.groups[0][0], self.head.grid.mesh
        if block.split.parts == 1:
            return TokenOrder()
        shape, into = shape_of(mesh), block.attention.into
        rows = block.split.parts // shape.context
        slices = into.slices if into.dataflow == "rs" and rows > 1 else 1
        return TokenOrder(shape.copies, shape.context, rows, slices, into.grid.num_cols)

    def padded_sequences(self, sequences: int) -> int:
        """Number of sequences that are computed for a microbatch of `sequences`."""
        return -(-sequences // self.sequence_unit) * self.sequence_unit

    def vocab_padding(self, vocab_size: int) -> int:
        """Number of tokens that pad the vocabulary to equal shards, in multiples of 128 for large vocabularies."""
        if not self.padded:
            return 0
        unit = math.lcm(self.head.grid.num_rows, self.head.grid.num_cols)
        unit *= LANES if vocab_size >= 8192 else 1  # a TPU's compiler would pad other shards
        return -vocab_size % unit


def _sole(names: set[str | None]) -> str | None:
    return names.pop() if len(names) == 1 else None


def _with_devices(mesh: Mesh | AbstractMesh) -> Mesh:
    assert isinstance(mesh, Mesh), f"{mesh} has no devices"
    return mesh
