"""The canonical form of a state, independent of mesh and plan, which checkpoints store."""

import functools
from typing import Any

import jax
import optax

from mstrain.hardware import once_options
from mstrain.mesh import platform_of
from mstrain.models import parameters
from mstrain.models.transformer import Transformer
from mstrain.program.offload import on_device
from mstrain.program.step import State, map_copies, shard_copies


@functools.lru_cache(maxsize=2)
def to_canonical(module: Transformer, optimizer: optax.GradientTransformation):
    """The compiled conversion of a state to canonical form, kept because every save needs it."""

    def convert(state):
        state = on_device(module, state)
        canonical = map_copies(lambda tree: parameters.to_canonical(module, tree), state, optimizer)
        shardings = shard_copies(parameters.canonical_shardings(module), canonical, optimizer)
        return jax.lax.with_sharding_constraint(canonical, shardings)

    values = sum(x.size for x in jax.tree.leaves(parameters.canonical_shapes(module)))
    options: Any = once_options(platform_of(module.plan.mesh), values, moves=True)
    return jax.jit(convert, compiler_options=options)


def canonical_targets(module: Transformer, optimizer: optax.GradientTransformation | None = None):
    """Abstract canonical state, spread over the devices; without an optimizer, only its parameters."""
    state: State = {"params": parameters.canonical_shapes(module)}
    if optimizer:
        state["step"] = jax.ShapeDtypeStruct((), "int32")
        state["optimizer"] = jax.eval_shape(optimizer.init, state["params"])
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shard_copies(parameters.canonical_shardings(module), state, optimizer),
    )


def differing_shapes(saved_parameters, parameters) -> list[str]:
    """One line for every canonical parameter whose shape in the checkpoint is not that of the model."""
    saved, wanted = _shapes(saved_parameters), _shapes(parameters)
    return [
        f"  {name}: checkpoint {saved.get(name, 'absent')}, model {wanted.get(name, 'absent')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(getattr(part, "key", part)) for part in path): tuple(leaf.shape) for path, leaf in leaves}
