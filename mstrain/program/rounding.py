"""Moments of an optimizer, and sums of gradients, stored in bfloat16: rounded to nearest, or stochastically.

A moment whose change is less than half of its last bit never changes when rounded to nearest; stochastic rounding keeps
its mean. The random bits of an element are a hash of the seed, the step, the parameter, the layer and the canonical
row and column, so they do not depend on mesh, algorithm or storage order.
"""

import dataclasses
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mstrain.models.parameters import STACK, abstract_parameters, is_masked
from mstrain.models.transformer import Transformer

ROUNDINGS = ("nearest", "stochastic")


def moments_in_bf16(optimizer: optax.GradientTransformation, rounding: str, seed: int):
    """`optimizer`, which computes in float32, with every tree of moments stored in bfloat16.

    The `update` of stochastic rounding takes the `module` of the parameters and the `step`.
    """
    inner = optax.with_extra_args_support(optimizer)

    def of_moments(function, state):
        return optax.tree_map_params(
            lambda params: jax.eval_shape(inner.init, params), function, state, is_leaf=lambda _: True
        )

    def cast(state, dtype):
        return of_moments(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree), state)

    def init(params):
        return cast(inner.init(params), jnp.bfloat16)

    def update(updates, state, params=None, **place):
        updates, new = inner.update(updates, cast(state, jnp.float32), params, **place)
        if rounding == "nearest":
            return updates, cast(new, jnp.bfloat16)
        key, copies = jax.random.fold_in(jax.random.key(seed), place["step"]), itertools.count()
        return updates, of_moments(
            lambda tree: _rounded(tree, place["module"], jax.random.fold_in(key, next(copies))), new
        )

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """Sums of gradients over the microbatches of a step: float32, or those of kernels and tables in bfloat16.

    Attributes:
      rounding: of bfloat16 after every addition, one of ROUNDINGS; None for float32.
      seed: of stochastic rounding.
    """

    rounding: str | None = None
    seed: int = 0

    def zeros(self, gradients):
        """Of the shape and sharding of `gradients`."""
        return self._stored(jax.tree.map(jnp.zeros_like, gradients), lambda x: x.astype(jnp.bfloat16))

    def add(self, module: Transformer, totals, gradients, step, microbatch):
        """`totals` with the float32 `gradients` of a microbatch, both as parameters of `module` are stored."""
        exact = jax.tree.map(lambda total, x: total.astype(jnp.float32) + x, totals, gradients)
        return self.rounded(module, exact, step, microbatch)

    def rounded(self, module: Transformer, exact, step, number, layers=None):
        """Float32 sums as they are stored after addition `number` of a step.

        `exact` has parameters of `module` by name, or of the stack of layers some rows only: those of `layers`.
        """
        if self.rounding != "stochastic":
            return self._stored(exact, lambda x: x.astype(jnp.bfloat16))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), step), zlib.crc32(b"gradients"))
        matrices = jax.tree_util.tree_map_with_path(lambda path, x: x if _is_matrix(path) else None, exact)
        rounded = _rounded(matrices, module, jax.random.fold_in(key, number), layers)
        return jax.tree.map(lambda x, y: x if y is None else y, exact, rounded)

    def _stored(self, tree, cast):
        if self.rounding is None:
            return tree
        return jax.tree_util.tree_map_with_path(lambda path, x: cast(x) if _is_matrix(path) else x, tree)


def _is_matrix(path) -> bool:
    return path[-1].key in ("kernel", "table")


def round_stochastically(x, bits):
    """float32 `x` in bfloat16: up with the probability that keeps the mean; `bits` uint32 random, 16 of them used."""
    sum_ = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    cut = jax.lax.bitcast_convert_type(sum_ & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def _rounded(tree, module: Transformer, key, layers=None):
    """One copy of the parameters, or some of them; `layers` numbers the rows of a stack that has some of them only."""
    of_stacks = _layers(module) if layers is None else {STACK: layers}
    boxes = {name: box for name, box in abstract_parameters(module).items() if name in tree}

    def of_parameter(path, x, box):
        if is_masked(x):
            return x
        names = [part.key for part in path]
        places = box.storage.places()
        if names[0] in of_stacks:  # number rows across layers
            rows = places[0] if len(places) == 2 else jnp.zeros(1, jnp.int32)
            across = jnp.asarray(of_stacks[names[0]])[:, None] * (rows.max() + 1) + rows
            places = [across.reshape(-1), places[-1]]
            names[0] = STACK if names[0].startswith("blocks_") else names[0]
        words = _words(jax.random.fold_in(key, zlib.crc32(".".join(names).encode())), places)
        if box.storage.transposed:
            words = words.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2]).swapaxes(-1, -2)
        return round_stochastically(x, words.reshape(x.shape))

    return jax.tree_util.tree_map_with_path(of_parameter, tree, boxes, is_leaf=is_masked)


def _layers(module: Transformer) -> dict[str, np.ndarray]:
    """The layer in every row of each stack of stored parameters."""
    counts = [count for _, count in module.plan.groups]
    dense = {f"dense_{i}": np.arange(count) for i, (_, count) in enumerate(module.plan.dense)}
    if module.plan.rows:
        return {**dense, STACK: np.array(module.plan.rows)}
    return dense | {f"blocks_{i}": sum(counts[:i]) + np.arange(count) for i, count in enumerate(counts)}


def _words(key, places):
    """A random uint32 for every place: [len(places[0]), ...] for one or two dims."""
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold_in(key, places[0].astype(jnp.uint32))
    if len(places) == 2:
        keys = jax.vmap(fold_in, (0, None))(keys, places[1].astype(jnp.uint32))
    return jax.random.key_data(keys)[..., 0]
