"""Conversion of parameters between canonical form (checkpoints) and stored form (training steps).

Canonical parameters have the order of the model, with all layers stacked in `blocks_0`, except that the first, dense
layers of a model with experts are stacked in `dense_0`, and layers that predict further tokens are `mtp_0`, `mtp_1`.
Stored parameters follow a plan: layers are split into its groups, or reordered over the stages of a pipeline
(`ModelPlan.rows`), and every parameter is reordered by its `Storage`. Both conversions are permutations with zero
padding, so a round trip is exact, and initial values do not depend on mesh, algorithm or slice count.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import EXPERT, SHARED, data_dim
from mstrain.hardware import once_options
from mstrain.layers.parameter import Stored, is_stored, partition_specs
from mstrain.mesh import platform_of
from mstrain.models.config import ModelConfig
from mstrain.models.plan import canonical_plan
from mstrain.models.sharding import gather_parameter, is_kernel, sharded_box, to_shard
from mstrain.models.stages import AXIS as STAGE
from mstrain.models.transformer import Transformer

Path = tuple[str, ...]  # keys of a parameter in its tree
STACK = "blocks_0"  # Linen's name of the first group, the only group of canonical parameters
FIRST = "dense_0"  # that of the first, dense layers of a model with experts
MTP = "mtp_"  # prefix of those of every layer that predicts a further token, which are not stacked


@functools.lru_cache(maxsize=8)
def abstract_parameters(module: Transformer):
    """Boxed abstract parameters of `module`, without allocation. Cached: callers must not modify the tree."""
    tokens = jax.ShapeDtypeStruct((module.seq * _sequences(module),), jnp.int32)
    boxed = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
    if module.plan.stages:
        boxed[STACK] = jax.tree.map(
            lambda box: box.replace(spec=P(STAGE, *box.spec[1:])), boxed[STACK], is_leaf=is_stored
        )
    if module.plan.shard == "none":
        return boxed
    return jax.tree.map(lambda box: sharded_box(box, module.plan.mesh), boxed, is_leaf=is_stored)


def parameter_shardings(module: Transformer):
    """Sharding of every stored parameter."""
    specs = partition_specs(abstract_parameters(module))
    return jax.tree.map(lambda spec: NamedSharding(module.plan.mesh, spec), specs)


def parameter_shapes(module: Transformer):
    """Abstract stored parameters without boxes."""
    return jax.tree.map(lambda box: box.value, abstract_parameters(module), is_leaf=is_stored)


def canonical_shapes(module: Transformer):
    """Abstract canonical parameters of the same model."""
    return canonical_model_shapes(module.model)


@functools.lru_cache(maxsize=8)
def canonical_model_shapes(model: ModelConfig):
    """Abstract canonical parameters of `model`. Cached: callers must not modify the tree."""
    return jax.eval_shape(lambda: _init_canonical(model, 0))


def init_canonical(module: Transformer, seed: int):
    """Canonical initial parameters, a pure function of the model and the seed."""
    return _init_canonical(module.model, seed)


def _init_canonical(model: ModelConfig, seed: int):
    canonical = Transformer(model, canonical_plan(model), seq=1)
    boxed = canonical.init(jax.random.key(seed), jnp.zeros((1,), jnp.int32))["params"]
    return jax.tree.map(lambda box: box.value, boxed, is_leaf=is_stored)


def init_parameters(module: Transformer, seed: int):
    """Stored initial parameters of `module`, created with their shardings."""

    def create():
        return from_canonical(module, init_canonical(module, seed))

    values = sum(x.size for x in jax.tree.leaves(canonical_shapes(module)))
    options: Any = once_options(platform_of(module.plan.mesh), values)
    return jax.jit(create, out_shardings=parameter_shardings(module), compiler_options=options)()


def from_canonical(module: Transformer, canonical):
    """Converts canonical parameters to the stored form of `module`."""
    return _map_leaves(module, canonical, lambda x, boxes, rows: _stored(x, boxes, rows, module.plan.mesh))


def from_canonical_in_turn(module: Transformer, canonical):
    """`from_canonical`, one array at a time: deletes each canonical array when its stored form is computed.

    The peak memory is that of one tree and one array. Arrays of equal shape and storage share a compiled program.
    """

    def convert(x, boxes, rows):
        stored = jax.block_until_ready(_from_canonical_program(boxes, rows, module.plan.mesh)(x))
        x.delete()
        return stored

    return _map_leaves(module, canonical, convert)


def compile_from_canonical(module: Transformer) -> None:
    """Compiles the programs of `from_canonical_in_turn` for the compilation cache."""
    programs = {}  # a dict, because all processes must compile in the same order

    def note(x, boxes, rows):
        programs[x, boxes] = _from_canonical_program(boxes, rows, module.plan.mesh)
        return boxes

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    _map_leaves(module, jax.tree.map(placed, canonical_shapes(module), canonical_shardings(module)), note)
    for (x, _), program in programs.items():
        program.lower(x).compile()


def gather_parameters(module: Transformer, stored):
    """Stored parameters as the model uses them: gathered over data-parallel replicas, except kernels that are gathered
    layer by layer."""
    if module.plan.shard == "none":
        return stored

    def gathered(path, x, sharding):
        later = module.plan.shard == "parameters" and path[0].key.startswith("blocks_") and is_kernel(path)
        return x if later else gather_parameter(path, x, sharding, module.dtype)

    return jax.tree_util.tree_map_with_path(gathered, stored, parameter_shardings(module))


def gradient_shards(module: Transformer, gradients):
    """Gradients of gathered parameters as float32 shards of data-parallel replicas."""
    return gradients if module.plan.shard == "none" else jax.tree.map(to_shard, gradients, parameter_shardings(module))


def describe_sharding(module: Transformer) -> str | None:
    """What data-parallel replicas share, and how many parameters are replicated; None if nothing is sharded."""
    plan = module.plan
    if plan.shard == "none":
        return None
    shapes, shardings = jax.tree.leaves(parameter_shapes(module)), jax.tree.leaves(parameter_shardings(module))
    whole = [(x, at) for x, at in zip(shapes, shardings, strict=True) if data_dim(at.spec) is None]
    size = sum(math.prod(at.shard_shape(x.shape)) * x.dtype.itemsize for x, at in whole)
    replicated = (
        f"; {len(whole)} of {len(shapes)} parameters, {size / 2**20:.2f} MiB per device, have no dim that divides"
    )
    copies = plan.head.grid.size(SHARED)
    return f"{plan.shard} over {copies} data-parallel replicas" + (f"{replicated} and are replicated" if whole else "")


def from_layers(module: Transformer, read: Callable[[Path, int, tuple[slice, ...]], np.ndarray]):
    """Stored parameters, made from the canonical parameters of one layer at a time.

    `read(path, layer, index)` returns the part `index` of the canonical parameter at `path` of one layer of its stack
    (0 for parameters outside of the blocks), float32. Beside the result, host memory is that of the parts of one
    layer's parameter that the devices of this process hold.
    """
    mesh, firsts, rows = module.plan.mesh, _first_layers(module), module.plan.rows

    def load(keys, box, sharding):
        group, *rest = (key.key for key in keys)
        path = (STACK if group.startswith("blocks_") else group, *rest)
        shape = box.storage.shape if group not in firsts else (1, *box.storage.shape)
        placement, ndim = _canonical_sharding(box, shape, mesh), len(box.storage.shape)

        def canonical(layer):
            parts: dict[str, np.ndarray] = {}  # data-parallel replicas read once

            def part(index):
                if str(index) not in parts:
                    parts[str(index)] = read(path, layer, index[-ndim:])
                return parts[str(index)] if group not in firsts else parts[str(index)][None]

            return jax.make_array_from_callback(shape, placement, part)

        if group not in firsts:
            return jax.block_until_ready(_from_canonical_program((box,), None, mesh)(canonical(0))[0])
        stack = jax.jit(lambda: jnp.zeros(box.value.shape, box.value.dtype), out_shardings=sharding)()
        rows_here = rows if group == STACK else None
        for i, layer in enumerate(rows_here or range(firsts[group], firsts[group] + box.value.shape[0])):
            if layer >= 0:
                stack = jax.block_until_ready(_insert_program(box, mesh, sharding)(stack, canonical(layer), i))
        return stack

    return jax.tree_util.tree_map_with_path(load, abstract_parameters(module), parameter_shardings(module),
                                            is_leaf=is_stored)  # fmt: skip


def layer_of(module: Transformer, stored, path: Path, layer: int) -> np.ndarray:
    """The canonical parameter at `path` of one layer of its stack (0 outside of the blocks), on every host; inverse of
    `from_layers`. All processes call it together."""
    rules, firsts = abstract_parameters(module), _first_layers(module)
    group = path[0]
    if group == STACK:
        group = max((name for name in firsts if name != FIRST and firsts[name] <= layer), key=lambda name: firsts[name])
    box, x = (functools.reduce(lambda tree, key: tree[key], (group, *path[1:]), tree) for tree in (rules, stored))
    if group not in firsts:
        return np.asarray(_to_canonical_program(box, module.plan.mesh)(x).addressable_data(0))
    extract = _to_canonical_program(box, module.plan.mesh, True)
    rows = module.plan.rows if group != FIRST else None
    row = rows.index(layer) if rows else layer - firsts[group]
    return np.asarray(extract(x, row).addressable_data(0))[0]


def _first_layers(module: Transformer) -> dict[str, int]:
    """The first layer of every group of layers in its canonical stack, by name of the group."""
    counts = [count for _, count in module.plan.groups]
    dense = {FIRST: 0} if module.plan.dense else {}
    return dense | {f"blocks_{i}": sum(counts[:i]) for i in range(len(counts))}


def to_canonical(module: Transformer, stored):
    """Converts the stored form of `module` to canonical parameters."""
    rules = abstract_parameters(module)

    def convert(x, box):
        return x if is_masked(x) else _convert("to_canonical", box, x, module.plan.mesh)

    rows = module.plan.rows
    if rows:
        stack = jax.tree.map(lambda x: x if is_masked(x) else _model_order(x, rows), stored[STACK], is_leaf=is_masked)
        stored = {**stored, STACK: stack}
    parts = jax.tree.map(convert, stored, rules, is_leaf=is_masked)
    groups = [parts.pop(f"blocks_{i}") for i in range(len(module.plan.groups))]
    stack = groups[0] if len(groups) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *groups)
    return {**parts, STACK: stack}


def canonical_shardings(module: Transformer):
    """The sharding of every canonical parameter: over all devices that shard it in a step, on one dim that divides.

    The dim is the second to last if possible; axis `data` is left out if no dim divides with it. The order of the mesh
    axes lets one all-to-all reach the stored form, so conversion and saving do not gather parameters.
    """
    boxes, mesh = abstract_parameters(module), module.plan.mesh
    boxes = {name: box for name, box in boxes.items() if not name.startswith("blocks_") or name == STACK}

    def sharding(box, shape):
        return _canonical_sharding(box, shape.shape, mesh)

    return jax.tree.map(sharding, boxes, canonical_shapes(module), is_leaf=is_stored)


def _canonical_sharding(box: Stored, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    own, lead = _axes(box, False), _lead(box, shape, mesh)
    dims = [dim for dim in (-2, -1) if len(shape) + dim >= 0 and len(shape) + dim not in lead]
    for axes in (own, _without_data(own)):
        for dim in dims:
            if shape[dim] % _devices(mesh, axes) == 0:
                return _sharded_on(dim, axes, len(shape), mesh, lead)
    return _sharded_on(None, own, len(shape), mesh, lead)


def _map_leaves(module: Transformer, canonical, convert):
    """Stored parameters; `convert(x, boxes, rows)` returns those of one canonical array (several for a stack of layers,
    or one with the layers of `rows`)."""
    rules, stored = abstract_parameters(module), {}
    for name, tree in canonical.items():
        targets = [f"blocks_{i}" for i in range(len(module.plan.groups))] if name == STACK else [name]
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_masked)
        boxes = zip(*(structure.flatten_up_to(rules[target]) for target in targets), strict=True)
        pairs = zip(leaves, boxes, strict=True)
        rows_here = module.plan.rows if name == STACK else None
        converted = [(x,) * len(boxes) if is_masked(x) else convert(x, boxes, rows_here) for x, boxes in pairs]
        stored |= zip(targets, map(structure.unflatten, zip(*converted, strict=True)), strict=True)
    return stored


def _row_order(x, rows: tuple[int, ...]):
    """Layers [L, ...] in the order of `rows`, zeros for padding."""
    if rows == tuple(range(len(x))):
        return x
    real = np.array(rows).reshape(-1, *[1] * (x.ndim - 1)) >= 0
    return jnp.where(real, x[np.maximum(rows, 0)], 0)


def _model_order(x, rows: tuple[int, ...]):
    """The inverse of `_row_order`."""
    layers = max(rows) + 1
    if rows == tuple(range(layers)):
        return x
    return x[np.array([rows.index(layer) for layer in range(layers)])]


def is_masked(x) -> bool:
    """Whether `x` is an empty node such as `optax.MaskedNode`, which replaces parameters without moments."""
    return not jax.tree.leaves(x)


def _stored(x, boxes: tuple[Stored, ...], rows: tuple[int, ...] | None, mesh: Mesh) -> tuple:
    if rows:
        x = _row_order(x, rows)
    ends = itertools.accumulate(box.value.shape[0] for box in boxes[:-1])
    parts = jnp.split(x, [*ends])
    return tuple(_convert("from_canonical", box, part, mesh) for box, part in zip(boxes, parts, strict=True))


@functools.lru_cache(maxsize=256)
def _from_canonical_program(boxes: tuple[Stored, ...], rows: tuple[int, ...] | None, mesh: Mesh):
    shardings = tuple(NamedSharding(mesh, box.spec) for box in boxes)

    def convert_parameter(x):
        return _stored(x, boxes, rows, mesh)

    values = sum(math.prod(box.value.shape) for box in boxes)
    options: Any = once_options(platform_of(mesh), values, moves=True)
    return jax.jit(convert_parameter, out_shardings=shardings, compiler_options=options)


@functools.lru_cache(maxsize=256)
def _insert_program(box: Stored, mesh: Mesh, sharding: NamedSharding):
    def insert(stack, x, layer):
        return jax.lax.dynamic_update_slice_in_dim(stack, _convert("from_canonical", box, x, mesh), layer, 0)

    return jax.jit(insert, donate_argnums=0, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _to_canonical_program(box: Stored, mesh: Mesh, stacked: bool = False):
    def extract(x, layer=0):
        part = jax.lax.dynamic_slice_in_dim(x, layer, 1) if stacked else x
        return _convert("to_canonical", box, part, mesh)

    return jax.jit(extract, out_shardings=NamedSharding(mesh, P()))


def _convert(direction: str, box: Stored, x, mesh: Mesh):
    assert x.ndim == box.value.ndim, f"{x.shape} has no stored form: the parameter is {box.value.shape}"

    def place(x, dim, stored):
        axes, lead = _axes(box, stored), _lead(box, x.shape, mesh)
        if dim is not None:
            if x.ndim + dim < 0 or x.ndim + dim in lead:
                return x
            if x.shape[dim] % _devices(mesh, axes):
                axes = _without_data(axes)
            if x.shape[dim] % _devices(mesh, axes):
                return x
        return jax.lax.with_sharding_constraint(x, _sharded_on(dim, axes, x.ndim, mesh, lead, both=dim is None))

    return x if box.storage.is_canonical else getattr(box.storage, direction)(x, place)


def _axes(box: Stored, stored: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes of the last two dims of a parameter, in stored or in canonical orientation."""
    spec = (axes if axes != STAGE else None for axes in (None, *box.spec)[-2:])  # of a vector: the dim of layers
    first, last = ((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec)
    return (last, first) if box.storage.transposed and not stored else (first, last)


def _lead(box: Stored, shape: tuple[int, ...], mesh: Mesh) -> dict[int, str]:
    """The mesh axes of the dims before the matrices in a parameter of this shape: layers of stages, experts."""
    stacked = len(shape) > len(box.storage.shape) and box.spec[0] == STAGE
    lead = {0: STAGE} if stacked and shape[0] % mesh.shape[STAGE] == 0 else {}
    if len(box.storage.shape) == 3 and box.spec[-3] == EXPERT:
        lead[len(shape) - 3] = EXPERT
    return lead


def _sharded_on(
    dim: int | None, axes, ndim: int, mesh: Mesh, lead: dict[int, str], both: bool = False
) -> NamedSharding:
    """Shards `dim` (-1 or -2) over all tensor-parallel devices, no dim for None, or `both` last dims as in a step; and
    the dims in `lead` over their axes."""
    spec: list = [None] * ndim
    if both:
        spec[-2:] = [axis or None for axis in axes][-ndim:]
    elif dim is not None:
        spec[dim] = (*axes[0], *axes[1]) if dim == -2 else (*axes[1], *axes[0])
    for lead_dim, axis in lead.items():
        spec[lead_dim] = axis
    return NamedSharding(mesh, P(*spec))


def _without_data(axes) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis in of_dim if axis not in SHARED) for of_dim in axes)


def _devices(mesh: Mesh, axes) -> int:
    """Tensor-parallel devices, times data-parallel replicas if one of the two dims has their axes."""
    names = {"row", "col", *(axis for of_dim in axes for axis in of_dim if axis in SHARED)}
    return math.prod(mesh.shape[axis] for axis in names)


def _sequences(module: Transformer) -> int:
    """The smallest number of sequences that divides over all devices, for tracing shapes."""
    return module.plan.mesh.size
