"""The tensors of a Hugging Face folder that hold each canonical parameter of a model."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import jax

from mstrain.layers.experts import BALANCE
from mstrain.models.config import ModelConfig
from mstrain.models.hub.families import MTP_COPIES, Family
from mstrain.models.parameters import FIRST, MTP, STACK, canonical_model_shapes
from mstrain.models.products import ATTENTION, block_products

_SUFFIX = {"kernel": "weight", "table": "weight", "scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor: columns `begin` to `end` of the last dim of a canonical parameter of one layer.

    Attributes:
      shape: of the tensor in the folder.
      transposed: whether the folder has the columns in its first dim.
      expert: the expert whose kernel it is; None for what is not of one expert.
      alternating: number of equal segments of the columns that alternate in the tensor: 1, or 2 for gate and up.
      copy_of: name of the tensor that it repeats; None for a tensor that is read.
    """

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    transposed: bool
    expert: int | None = None
    alternating: int = 1
    copy_of: str | None = None

    @property
    def source(self) -> str:
        """Name of the tensor with its values that is read."""
        return self.copy_of or self.name

    def columns(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """(columns of the parameter, columns of the tensor) that are the same ones, of those from `first` to `last`.

        Columns of the tensor are every n-th, for n = `alternating`.
        """
        n, width = self.alternating, (self.end - self.begin) // self.alternating
        for segment in range(n):
            start = self.begin + segment * width
            begin, end = max(first, start), min(last, start + width)
            if begin < end:
                yield slice(begin, end), slice(n * (begin - start) + segment, n * (end - 1 - start) + segment + 1, n)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One canonical parameter: its path and, for each layer (one where it is not stacked), its parts.

    Without parts it is zero: the biases of routers that no gradient trains, of families without them.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    layers: tuple[tuple[Part, ...], ...]


def parameters_of(model: ModelConfig, family: Family) -> Iterator[Parameter]:
    """All canonical parameters of `model` that `family` has, with the tensors that hold them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(canonical_model_shapes(model))
    for keys, leaf in leaves:
        path = tuple(key.key for key in keys)
        if path[0].startswith(MTP) and not family.mtp:
            continue
        stacked, first = path[0] in (STACK, FIRST), model.dense_layers if path[0] == STACK else 0
        if path[0].startswith(MTP):
            first = model.layers + int(path[0].removeprefix(MTP))
        shape, count = (leaf.shape[1:], leaf.shape[0]) if stacked else (leaf.shape, 1)
        yield Parameter(path, shape, tuple(_parts(model, family, path, shape, first + i) for i in range(count)))


def _parts(model: ModelConfig, family: Family, path: tuple[str, ...], shape, layer: int) -> tuple[Part, ...]:
    modules = family.modules | family.mtp | (family.dense if path[0] == FIRST else {})
    *module, leaf = path = _as_in_tables(path)
    whole = "/".join(path)
    if leaf == BALANCE and whole not in {**modules, **family.tensors}:
        return ()
    if whole in family.tensors:
        both = family.alternating and whole.startswith("blocks_0/mlp/up")
        return (Part(family.tensors[whole].format(layer), 0, shape[-1], shape, False, None, 2 if both else 1),)
    suffix = "weight" if whole in modules else _SUFFIX[leaf]
    template = modules[whole if whole in modules else "/".join(module)]
    if not model.latent.query_rank:
        template = template.replace("q_a_proj", "q_proj")
    transposed = family.transposed and leaf in ("kernel", "router") or path == ("head", "kernel")
    parts = []
    for expert in range(shape[0]) if len(shape) == 3 else (None,):
        names, begin = template.format(layer, expert).split(), 0
        widths = _widths(model, path[1], shape[-1], len(names))
        for name, width in zip(names, widths, strict=True):
            own, end = (*shape[-2:-1], width), begin + width
            parts.append(Part(f"{name}.{suffix}", begin, end, own[::-1] if transposed else own, transposed, expert))
            begin = end
    return (*parts, *_copies(model, family, path[0], parts))


def _as_in_tables(path: tuple[str, ...]) -> tuple[str, ...]:
    """`path` of a canonical parameter as in the tables of families, which have blocks once."""
    if path[0].startswith(MTP):
        return (STACK, *path[2:]) if path[1] == "block" else ("mtp", *path[1:])
    return (STACK if path[0] == FIRST else path[0], *path[1:])


def _copies(model: ModelConfig, family: Family, name: str, parts: list[Part]) -> Iterator[Part]:
    """The copies of a parameter of the model in its layers that predict further tokens."""
    names = ("embedding", "head") if name == "embedding" and model.tied else (name,)
    for template in (MTP_COPIES[name] for name in names if family.mtp and name in MTP_COPIES):
        for layer in range(model.layers, model.layers + model.mtp_layers):
            yield from (replace(part, name=f"{template.format(layer)}.weight", copy_of=part.name) for part in parts)


def _widths(model: ModelConfig, half: str, width: int, count: int) -> tuple[int, ...]:
    """Widths of `count` modules that a parameter of `half` of a block holds side by side, `width` in all."""
    if half != ATTENTION or count == 1:
        return (width // count,) * count
    segments = next(product.segments for product in block_products(model) if product.half == ATTENTION)
    return (*segments[: count - 1], sum(segments[count - 1 :]))
