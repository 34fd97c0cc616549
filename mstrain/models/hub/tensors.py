"""The tensors of a Hugging Face folder that hold each canonical parameter of a model."""

import dataclasses
from collections.abc import Iterator

import jax

from mstrain.layers.experts import BALANCE
from mstrain.models.config import ModelConfig
from mstrain.models.hub.families import Family
from mstrain.models.parameters import STACK, canonical_model_shapes
from mstrain.models.products import ATTENTION, MLP, block_products

_SUFFIX = {"kernel": "weight", "table": "weight", "scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor: columns `begin` to `end` of the last dim of a canonical parameter of one layer.

    Attributes:
      shape: of the tensor in the folder.
      transposed: whether the folder has the columns in its first dim.
      expert: the expert whose kernel it is; None for what is not of one expert.
      alternating: number of equal segments of the columns that alternate in the tensor: 1, or 2 for gate and up.
    """

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    transposed: bool
    expert: int | None = None
    alternating: int = 1

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
    """All canonical parameters of `model`, with the tensors of `family` that hold them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(canonical_model_shapes(model))
    for keys, leaf in leaves:
        path = tuple(key.key for key in keys)
        shape = leaf.shape[1:] if path[0] == STACK else leaf.shape
        count = leaf.shape[0] if path[0] == STACK else 1
        yield Parameter(path, shape, tuple(_parts(model, family, path, shape, layer) for layer in range(count)))


def _parts(model: ModelConfig, family: Family, path: tuple[str, ...], shape, layer: int) -> tuple[Part, ...]:
    *module, leaf = path
    whole = "/".join(path)
    if leaf == BALANCE and whole not in {**family.modules, **family.tensors}:
        return ()
    if whole in family.tensors:
        both = family.alternating and whole.startswith("blocks_0/mlp/up")
        return (Part(family.tensors[whole].format(layer), 0, shape[-1], shape, False, None, 2 if both else 1),)
    suffix = "weight" if whole in family.modules else _SUFFIX[leaf]
    template = family.modules[whole if whole in family.modules else "/".join(module)]
    transposed = family.transposed and leaf in ("kernel", "router") or path == ("head", "kernel")
    parts = []
    for expert in range(shape[0]) if len(shape) == 3 else (None,):
        modules, begin = template.format(layer, expert).split(), 0
        widths = shape[-1:] if len(modules) == 1 else _segments(model, module[-2])
        for name, width in zip(modules, widths, strict=True):
            own, end = (*shape[-2:-1], width), begin + width
            parts.append(Part(f"{name}.{suffix}", begin, end, own[::-1] if transposed else own, transposed, expert))
            begin = end
    return tuple(parts)


def _segments(model: ModelConfig, half: str) -> tuple[int, ...]:
    """Widths of the fused projection into the half of a block that contains the module `half`."""
    assert half in (ATTENTION, MLP)
    return next(product.segments for product in block_products(model) if product.half == half)
