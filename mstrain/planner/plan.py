"""One plan for a pod, and how it would compute the products of a block: exactly as train.py would."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from mstrain.hardware import Chip
from mstrain.mesh import MeshShape
from mstrain.models.auto import projections
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.parallel.dataflow import Projection
from mstrain.parallel.product_cost import Layout
from mstrain.planner.meshes import plan_on


@dataclass(frozen=True)
class PodPlan:
    """Parallel degrees and choices of one plan.

    Attributes:
      data: replicas; `sharded`: each keeps a part of the optimizer state (ZeRO stage 1), else all of it.
      algorithm, rows, cols: of the tensor products; Megatron and FSDP use rows x cols devices as one ring.
      pipeline: stages; microbatches: per step and replica.
      remat: what a layer keeps for its backward pass (train.py's key).
      slices: MeshSlice's slice count (train.py's key): one number, or auto for the tuner's per product.
    """

    data: int
    algorithm: str
    rows: int
    cols: int
    pipeline: int
    microbatches: int
    remat: str
    sharded: bool = False
    slices: str = "auto"

    @property
    def tensor(self) -> int:
        return self.rows * self.cols

    @property
    def name(self) -> str:
        """What makes plans distinct: everything but microbatches, remat and slices."""
        sharded = " sharded" if self.sharded else ""
        return f"data {self.data}{sharded}, {self.tensor_name}, pipeline {self.pipeline}"

    @property
    def tensor_name(self) -> str:
        """The algorithm, with the mesh it slices or the number of devices in its ring."""
        shape = f"{self.rows}x{self.cols}" if self.algorithm == "meshslice" else self.tensor
        return f"{self.algorithm} {shape}"

    @property
    def mesh(self) -> str:
        return f"{self.data}x{self.rows}x{self.cols}"

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

    `turned`: the rows of the layout lie along the columns of the mesh.
    """

    layout: Layout
    slices: int
    turned: bool = False

    @property
    def name(self) -> str:
        return self.layout.projection.name


@dataclass(frozen=True)
class Products:
    """The four products of a block, and the output projection."""

    block: tuple[Product, ...]
    head: Product


@lru_cache(maxsize=1 << 14)
def plan_products(
    model: ModelConfig, plan: PodPlan, sequences: int, seq: int, chip: Chip, dtype_bytes: int
) -> Products | str:
    """How `sequences` of `seq` tokens go through the mesh of a plan; a string says why they cannot.

    The checks, dataflows and slice counts are those of train.py (`mstrain.models.plan`).
    """
    shape = MeshShape(1, plan.rows, plan.cols)
    one = dataclasses.replace(model, layers=1)
    try:
        made = plan_on(shape, ParallelConfig(plan.algorithm, slices=plan.slices), one, sequences, seq, chip)
    except ValueError as error:
        return str(error)
    block = made.groups[0][0]
    tokens = sequences * seq
    products = (
        _product(projection, part, tokens, dtype_bytes)
        for projection, part in zip(projections(model), block.products, strict=True)
    )
    head = Projection("output", model.width, model.vocab_size + made.vocab_padding(model.vocab_size))
    return Products(tuple(products), _product(head, made.head, tokens, dtype_bytes))


def _product(projection: Projection, plan, tokens: int, dtype_bytes: int) -> Product:
    # The tuner's "rs" swaps rows and columns unless its input arrives transposed; the trainer's plan has
    # done so.
    layout = Layout(
        projection,
        tokens,
        plan.grid.num_rows,
        plan.grid.num_cols,
        plan.dataflow,
        plan.dataflow == "rs",
        dtype_bytes,
    )
    return Product(layout, plan.slices, plan.grid.rows == ("col",))
