"""Parameters in two forms: canonical, as checkpoints carry them, and stored, as a plan runs them.

Canonical parameters are whole, in the model's own order, every layer stacked in `blocks_0`. Stored ones
follow the plan: layers split into its groups, every parameter reordered by its `Storage`. Both ways are
permutations (and zero padding), so a round trip is exact, and initial values do not depend on mesh, algorithm
or slice count.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.layers.parameter import Stored, is_stored, partition_specs
from mstrain.models.plan import canonical_plan
from mstrain.models.transformer import Transformer

STACK = "blocks_0"  # Linen's name of the first group; the only one of canonical parameters


@functools.lru_cache(maxsize=8)
def abstract_parameters(module: Transformer):
    """Boxed abstract parameters of `module`; nothing is allocated. Traced once; do not change the tree."""
    tokens = jax.ShapeDtypeStruct((module.seq * _sequences(module),), jnp.int32)
    return jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]


def parameter_shardings(module: Transformer):
    """Sharding of every stored parameter."""
    specs = partition_specs(abstract_parameters(module))
    return jax.tree.map(lambda spec: NamedSharding(module.plan.mesh, spec), specs)


def parameter_shapes(module: Transformer):
    """Abstract stored parameters, without their boxes."""
    return jax.tree.map(lambda box: box.value, abstract_parameters(module), is_leaf=is_stored)


@functools.lru_cache(maxsize=8)
def canonical_shapes(module: Transformer):
    """Abstract canonical parameters of the same model."""
    return jax.eval_shape(lambda: init_canonical(module, 0))


def init_canonical(module: Transformer, seed: int):
    """Canonical initial parameters, a pure function of the model and the seed."""
    canonical = Transformer(module.model, canonical_plan(module.model), seq=1)
    boxed = canonical.init(jax.random.key(seed), jnp.zeros((1,), jnp.int32))["params"]
    return jax.tree.map(lambda box: box.value, boxed, is_leaf=is_stored)


def init_parameters(module: Transformer, seed: int):
    """Initial parameters of `module`, created where they live."""

    def create():
        return from_canonical(module, init_canonical(module, seed))

    return jax.jit(create, out_shardings=parameter_shardings(module))()


def from_canonical(module: Transformer, canonical):
    """Canonical parameters to the form `module` runs."""
    return _map_leaves(module, canonical, lambda x, boxes: _stored(x, boxes, module.plan.mesh))


def from_canonical_in_turn(module: Transformer, canonical):
    """`from_canonical` for a tree of arrays, which it consumes: each is freed when its stored form is there, so that
    memory holds little beside one tree. Arrays of one shape and storage share a compiled program.
    """

    def convert(x, boxes):
        stored = jax.block_until_ready(_from_canonical_program(boxes, module.plan.mesh)(x))
        x.delete()
        return stored

    return _map_leaves(module, canonical, convert)


def compile_from_canonical(module: Transformer) -> None:
    """Compiles what `from_canonical_in_turn` will need, for the compilation cache."""
    programs = {}  # in one order on all processes

    def note(x, boxes):
        programs[x, boxes] = _from_canonical_program(boxes, module.plan.mesh)
        return boxes

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    _map_leaves(module, jax.tree.map(placed, canonical_shapes(module), canonical_shardings(module)), note)
    for (x, _), program in programs.items():
        program.lower(x).compile()


def to_canonical(module: Transformer, stored):
    """The form `module` runs to canonical parameters."""
    rules = abstract_parameters(module)

    def convert(x, box):
        return x if is_masked(x) else _convert("to_canonical", box, x, module.plan.mesh)

    parts = jax.tree.map(convert, stored, rules, is_leaf=is_masked)
    groups = [parts.pop(f"blocks_{i}") for i in range(len(module.plan.groups))]
    stack = groups[0] if len(groups) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *groups)
    return {**parts, STACK: stack}


def canonical_shardings(module: Transformer):
    """A sharding for every canonical parameter: over all tensor-parallel devices, on one dim that divides.

    That dim is the second last where possible, with mesh axes in the order that lets an all-to-all along one
    of them reach the stored form, so that converting and saving never gathers a parameter.
    """
    boxes, mesh = abstract_parameters(module), module.plan.mesh
    boxes = {name: box for name, box in boxes.items() if not name.startswith("blocks_") or name == STACK}

    def sharding(box, shape):
        dims = [dim for dim in (-2, -1) if len(shape.shape) + dim >= 0]
        divides = [dim for dim in dims if shape.shape[dim] % _devices(mesh) == 0]
        return _sharded_on(divides[0] if divides else None, _axes(box, False), len(shape.shape), mesh)

    return jax.tree.map(sharding, boxes, canonical_shapes(module), is_leaf=is_stored)


def _map_leaves(module: Transformer, canonical, convert):
    """Stored parameters; `convert(x, boxes)` gives those of one canonical array (a stack has several)."""
    rules, stored = abstract_parameters(module), {}
    for name, tree in canonical.items():
        targets = [f"blocks_{i}" for i in range(len(module.plan.groups))] if name == STACK else [name]
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_masked)
        boxes = zip(*(structure.flatten_up_to(rules[target]) for target in targets), strict=True)
        pairs = zip(leaves, boxes, strict=True)
        converted = [(x,) * len(boxes) if is_masked(x) else convert(x, boxes) for x, boxes in pairs]
        stored |= zip(targets, map(structure.unflatten, zip(*converted, strict=True)), strict=True)
    return stored


def is_masked(x) -> bool:
    """Whether `x` replaces parameters in a tree of moments that has none of them, as `optax.MaskedNode` does."""
    return not jax.tree.leaves(x)


def _stored(x, boxes: tuple[Stored, ...], mesh: Mesh) -> tuple:
    ends = itertools.accumulate(box.value.shape[0] for box in boxes[:-1])
    parts = jnp.split(x, [*ends])
    return tuple(_convert("from_canonical", box, part, mesh) for box, part in zip(boxes, parts, strict=True))


@functools.lru_cache(maxsize=256)
def _from_canonical_program(boxes: tuple[Stored, ...], mesh: Mesh):
    shardings = tuple(NamedSharding(mesh, box.spec) for box in boxes)

    def convert_parameter(x):
        return _stored(x, boxes, mesh)

    return jax.jit(convert_parameter, out_shardings=shardings)


def _convert(direction: str, box: Stored, x, mesh: Mesh):
    assert x.ndim == box.value.ndim, f"{x.shape} has no stored form: the parameter is {box.value.shape}"

    def place(x, dim, stored):
        if dim is not None and (x.ndim + dim < 0 or x.shape[dim] % _devices(mesh)):
            return x
        sharding = _sharded_on(dim, _axes(box, stored), x.ndim, mesh, both=dim is None)
        return jax.lax.with_sharding_constraint(x, sharding)

    return x if box.storage.is_canonical else getattr(box.storage, direction)(x, place)


def _axes(box: Stored, stored: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes of the last two dims of a parameter, in stored or in canonical orientation."""
    first, last = (
        (axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in (None, *box.spec)[-2:]
    )
    return (last, first) if box.storage.transposed and not stored else (first, last)


def _sharded_on(dim: int | None, axes, ndim: int, mesh: Mesh, both: bool = False) -> NamedSharding:
    """All tensor-parallel devices on one of the last two dims (None: on none), or on `both` as in a step."""
    spec: list = [None] * ndim
    if both:
        spec[-2:] = [axis or None for axis in axes][-ndim:]
    elif dim is not None:
        spec[dim] = (*axes[0], *axes[1]) if dim == -2 else (*axes[1], *axes[0])
    return NamedSharding(mesh, P(*spec))


def _devices(mesh: Mesh) -> int:
    return mesh.shape["row"] * mesh.shape["col"]


def _sequences(module: Transformer) -> int:
    """Fewest sequences that divide over every device, so that shapes can be traced."""
    return module.plan.mesh.size
