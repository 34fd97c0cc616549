"""The matrix products of a block, as used by plans, tuner, planner and benchmarks."""

import dataclasses
import functools
import math

from mstrain.gemm import Heads, Span
from mstrain.gemm.padding import waste
from mstrain.layers.latent_attention import LatentSizes
from mstrain.models.config import ModelConfig
from mstrain.parallel.dataflow import Projection

HALVES = ATTENTION, MLP = "attention", "mlp"  # of a block; each has a product into it and one out of it
QUERIES, KEYS = "queries", "keys"  # products out of latents
SHARED = "shared"  # the MLP of the experts of a block that compute every token
MTP = "multi-token prediction"  # the product of features and embedding in a layer that predicts a further token
DENSE = "dense mlp"  # in the place of MLP in the first, dense layers of a model with experts


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
    latent: LatentSizes | None = None

    @property
    def projected(self) -> tuple[tuple[Span, ...], Span]:
        """Output features of the product into attention, and input features of the one out of it."""
        if self.latent:
            return self.latent.into, self.latent.values
        return self.heads.segments, self.heads.segments[0]

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
    return Sizes(Span(model.width), Span(model.mlp_dim), heads, latent_sizes(model, heads))


def latent_sizes(model: ModelConfig, heads: Heads) -> LatentSizes | None:
    """Features of latent attention with these heads; None for ordinary attention."""
    of = model.latent
    if not of.key_rank:
        return None
    return LatentSizes(heads, of.query_rank, of.key_rank, of.rotary_dim, of.value_dim)


def sizes_on(model: ModelConfig, rows: int, columns: int) -> Sizes:
    """Padded for any dataflow on a grid of rows x columns."""
    unit = math.lcm(rows, columns)
    heads = Heads(model.heads, model.num_kv_heads, model.head_dim, columns, unit, unit)
    width, hidden = (Span(size).to_multiple(unit) for size in (model.width, model.mlp_dim))
    return Sizes(width, hidden, heads, latent_sizes(model, heads))


def block_products(model: ModelConfig, sizes: Sizes | None = None) -> tuple[BlockProduct, ...]:
    """The products of one block of `model` in the order of its forward pass, with the padding of `sizes`."""
    sizes = sizes or plain_sizes(model)
    width, hidden, (into, out) = sizes.width.stored, sizes.hidden.stored, sizes.projected
    return (
        BlockProduct(ATTENTION, "in", width, tuple(span.stored for span in into)),
        BlockProduct(ATTENTION, "out", out.stored, (width,)),
        BlockProduct(MLP, "in", width, (hidden,) * (2 if model.gated else 1)),
        BlockProduct(MLP, "out", hidden, (width,)),
    )


def dense_products(model: ModelConfig, sizes: Sizes | None = None) -> tuple[BlockProduct, ...]:
    """The products of the MLP of the first, dense layers; none for a model without them."""
    if not model.dense_layers:
        return ()
    every = block_products(model.first_layers, sizes)
    return tuple(dataclasses.replace(product, half=DENSE) for product in every if product.half == MLP)


def further_products(model: ModelConfig, sizes: Sizes | None = None) -> tuple[BlockProduct, ...]:
    """The products of one block beside those of `block_products`: from latents to heads, and of shared experts."""
    sizes, found = sizes or plain_sizes(model), []
    if latent := sizes.latent:
        queries, keys, _ = latent.into
        found += [BlockProduct(QUERIES, "in", queries.stored, (latent.queries.stored,))] if latent.query_rank else []
        found.append(BlockProduct(KEYS, "in", keys.stored, (latent.keys_values.stored,)))
    if model.shared_experts:
        width, hidden = sizes.width.stored, model.shared_experts * sizes.hidden.stored
        found.append(BlockProduct(SHARED, "in", width, (hidden,) * (2 if model.gated else 1)))
        found.append(BlockProduct(SHARED, "out", hidden, (width,)))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def attention_features(model: ModelConfig) -> tuple[int, int]:
    """Features per token of the results of the products into attention, latents included, and of its own result."""
    into, out = plain_sizes(model).projected
    further = (p.out_dim for p in further_products(model) if p.half in (QUERIES, KEYS))
    return sum(span.size for span in into) + sum(further), out.size


def hidden_features(model: ModelConfig) -> int:
    """Hidden features of the MLP per token: of the experts that it chooses and of those that all share."""
    return model.mlp_dim * (model.experts_per_token + model.shared_experts if model.experts else 1)


def projections(model: ModelConfig, sizes: Sizes | None = None) -> tuple[Projection, ...]:
    """The products of one block for the cost model, with the padding of `sizes`."""
    made = tuple(Projection(p.name, p.in_dim, p.out_dim) for p in block_products(model, sizes))
    if not model.experts:
        return made
    *attention, into, out = made
    each = functools.partial(dataclasses.replace, experts=model.experts)
    return (*attention, each(into, rows_out=model.experts_per_token), each(out, rows_in=model.experts_per_token))
