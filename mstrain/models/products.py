"""The matrix products of a block, as used by plans, tuner, planner and benchmarks."""

import dataclasses

from mstrain.models.config import ModelConfig
from mstrain.parallel.dataflow import Projection

HALVES = ATTENTION, MLP = "attention", "mlp"  # of a block; each has a product into it and one out of it


@dataclasses.dataclass(frozen=True)
class BlockProduct:
    """One product: the `half` of the block, its `side` (`in` or `out`), input features, segments of output features.

    A fused projection has several segments, each sharded over the columns of the mesh.
    """

    half: str
    side: str
    in_dim: int
    segments: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.half} {self.side}"

    @property
    def out_dim(self) -> int:
        return sum(self.segments)


def block_products(model: ModelConfig) -> tuple[BlockProduct, ...]:
    """The products of one block of `model` in the order of its forward pass."""
    heads, kv = model.heads * model.head_dim, model.num_kv_heads * model.head_dim
    up = (model.mlp_dim,) * (2 if model.gated else 1)
    return (
        BlockProduct(ATTENTION, "in", model.width, (heads, kv, kv)),
        BlockProduct(ATTENTION, "out", heads, (model.width,)),
        BlockProduct(MLP, "in", model.width, up),
        BlockProduct(MLP, "out", model.mlp_dim, (model.width,)),
    )


def projections(model: ModelConfig, repeats: int = 1) -> tuple[Projection, ...]:
    """The products of one block for the cost model, each `repeats` times."""
    return tuple(Projection(p.name, p.in_dim, p.out_dim, repeats) for p in block_products(model))
