"""The matrix products of a block, as used by plans, tuner, planner and benchmarks."""

import dataclasses
import functools
import math

from mstrain.gemm import Heads, Span
from mstrain.gemm.padding import waste
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


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The features of a block with their padding: of the residual stream, of the hidden layer of its MLP, of heads."""

    width: Span
    hidden: Span
    heads: Heads

    @property
    def padding(self) -> dict[str, tuple[int, int]]:
        """(size, padded size) of everything that is padded, by the name of its field of `ModelConfig`."""
        heads = (self.heads.queries, self.heads.queries_here * self.heads.columns)
        sizes = {"width": (self.width.size, self.width.stored), "mlp_dim": (self.hidden.size, self.hidden.stored)}
        return {name: pair for name, pair in {**sizes, "heads": heads}.items() if pair[0] < pair[1]}

    @property
    def waste(self) -> dict[str, float]:
        """Share of padding, by the name of a field of `ModelConfig`."""
        features = {"width": self.width, "mlp_dim": self.hidden}
        return {name: waste(span.size, span.stored) for name, span in features.items()} | {"heads": self.heads.waste}


def plain_sizes(model: ModelConfig) -> Sizes:
    """Without padding, as on one device."""
    heads = Heads(model.heads, model.num_kv_heads, model.head_dim)
    return Sizes(Span(model.width), Span(model.mlp_dim), heads)


def sizes_on(model: ModelConfig, rows: int, columns: int) -> Sizes:
    """Padded for any dataflow on a grid of rows x columns."""
    unit, heads = math.lcm(rows, columns), (model.heads, model.num_kv_heads, model.head_dim)
    width, hidden = (Span(size).to_multiple(unit) for size in (model.width, model.mlp_dim))
    return Sizes(width, hidden, Heads(*heads, columns, unit, unit))


def block_products(model: ModelConfig, sizes: Sizes | None = None) -> tuple[BlockProduct, ...]:
    """The products of one block of `model` in the order of its forward pass, with the padding of `sizes`."""
    sizes = sizes or plain_sizes(model)
    width, hidden, projected = sizes.width.stored, sizes.hidden.stored, [s.stored for s in sizes.heads.segments]
    return (
        BlockProduct(ATTENTION, "in", width, tuple(projected)),
        BlockProduct(ATTENTION, "out", projected[0], (width,)),
        BlockProduct(MLP, "in", width, (hidden,) * (2 if model.gated else 1)),
        BlockProduct(MLP, "out", hidden, (width,)),
    )


def projections(model: ModelConfig, repeats: int = 1, sizes: Sizes | None = None) -> tuple[Projection, ...]:
    """The products of one block for the cost model, each `repeats` times, with the padding of `sizes`."""
    made = tuple(Projection(p.name, p.in_dim, p.out_dim, repeats) for p in block_products(model, sizes))
    if not model.experts:
        return made
    *attention, into, out = made
    each = functools.partial(dataclasses.replace, experts=model.experts)
    return (*attention, each(into, rows_out=model.experts_per_token), each(out, rows_in=model.experts_per_token))
