"""The matrix products of a block: the one list of them, which plans, tuner, planner and benchmarks go through."""

import dataclasses

from mstrain.models.config import ModelConfig
from mstrain.parallel.dataflow import Projection

HALVES = ATTENTION, MLP = "attention", "mlp"  # of a block; each has a product into it and one out of it


@dataclasses.dataclass(frozen=True)
class BlockProduct:
    """One product: `half` of the block, `side` of it (`in` or `out`), features in, and features out as `segments`.

    A fused projection has several segments, each of which is split over the columns of the mesh.
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
    """The same for the cost model, `repeats` times."""
    return tuple(Projection(p.name, p.in_dim, p.out_dim, repeats) for p in block_products(model))
