"""Optimizers whose update is not elementwise, such as Adafactor with its means over rows and columns.

Padding and storage order would change what they compute. They run on canonical parameters: a step converts gradients
and parameters to canonical form and the update back. Their state is canonical everywhere, in checkpoints too.
"""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import axes_of
from mstrain.models import parameters
from mstrain.models.parameters import STACK
from mstrain.models.transformer import Transformer


class OnCanonical(optax.GradientTransformationExtraArgs):
    """An optimizer of canonical parameters."""


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optimizer` on every layer of the stack by itself, so that none of its statistics spans layers."""

    def divide(params):
        return params[STACK], {name: tree for name, tree in params.items() if name != STACK}

    def init(params):
        layers, rest = divide(params)
        return {"layers": jax.vmap(optimizer.init)(layers), "rest": optimizer.init(rest)}

    inner = optax.with_extra_args_support(optimizer)

    def update(updates, state: Any, params=None, **place):
        def of_one(updates, state, params):
            return inner.update(updates, state, params, **place)

        (of_layers, others), (layers, rest) = divide(updates), divide(params)
        of_layers, new_layers = jax.vmap(of_one)(of_layers, state["layers"], layers)
        others, new = of_one(others, state["rest"], rest)
        return {**cast(dict, others), STACK: of_layers}, {"layers": new_layers, "rest": new}

    return optax.GradientTransformationExtraArgs(init, update)


def init_moments(module: Transformer, optimizer: optax.GradientTransformation, params):
    """The state of `optimizer` at step 0 for stored `params`; for abstract ones under `jax.eval_shape`."""
    if isinstance(optimizer, OnCanonical):
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters.canonical_shapes(module))
    return optimizer.init(params)


def update(module: Transformer, optimizer: optax.GradientTransformation, grads, state: dict, schedule):
    """(updates of stored parameters, new moments) from stored gradients and the training state, in a compiled step."""
    place = {"schedule": schedule, "module": module, "step": state["step"]}
    if not isinstance(optimizer, OnCanonical):
        return optax.with_extra_args_support(optimizer).update(grads, state["optimizer"], state["params"], **place)
    shardings = parameters.canonical_shardings(module)

    def canonical(stored):
        return jax.lax.with_sharding_constraint(parameters.to_canonical(module, stored), shardings)

    updates, moments = optimizer.update(canonical(grads), state["optimizer"], canonical(state["params"]), **place)
    return parameters.from_canonical(module, updates), moments


def spread(moments, shardings):
    """Shardings of canonical moments of any shape: on the last dim that divides over the devices that shard the
    parameters, or over those of one TPU slice's rows and columns; others are replicated.

    `shardings` are those of the parameters.
    """
    leaves: list[NamedSharding] = jax.tree.leaves(shardings)
    used = {axis for sharding in leaves for entry in sharding.spec for axis in axes_of(entry)}
    mesh = leaves[0].mesh
    assert isinstance(mesh, Mesh)
    axes = tuple(axis for axis in mesh.axis_names if axis in used and axis != parameters.STAGE)
    choices = (axes, tuple(axis for axis in axes if axis in ("row", "col")))

    def sharding(x):
        for names in choices:
            count = math.prod(mesh.shape[axis] for axis in names)
            for dim in reversed(range(x.ndim)):
                if x.shape[dim] >= count and x.shape[dim] % count == 0 and names:
                    return NamedSharding(mesh, P(*[None] * dim, names))
        return NamedSharding(mesh, P())

    return jax.tree.map(sharding, moments)
