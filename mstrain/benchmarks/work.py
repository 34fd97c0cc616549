"""A program with its arguments, abstract and real."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.layers.parameter import is_stored


@dataclasses.dataclass(frozen=True)
class Work:
    """One program of a case.

    Attributes:
      part: what it is: `step`, `layer`, or the name of a product.
      plan: its dataflows and slice counts, in words.
      function, arguments: what is compiled; the arguments are abstract, with shardings.
      start: creates real arguments on the devices.
      tokens, flops: of one execution, whole job; model FLOPs, recomputation not counted.
      carries: the first result is the first argument of the next execution.
    """

    part: str
    plan: str
    function: Callable
    arguments: tuple
    start: Callable[[], tuple]
    tokens: int
    flops: float
    carries: bool = False


def abstract(shape: tuple[int, ...], dtype: jnp.dtype, mesh: Mesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def boxed_arguments(module: nn.Module, mesh: Mesh, *inputs):
    """Abstract parameters of a layer, each where its partition spec puts it."""
    arrays = [x for x in inputs if isinstance(x, jax.ShapeDtypeStruct)]
    rest = inputs[len(arrays) :]
    boxed = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs, *rest), *arrays).get("params", {})
    return jax.tree.map(
        lambda box: abstract(box.value.shape, box.value.dtype, mesh, box.spec), boxed, is_leaf=is_stored
    )


def random_arguments(arguments: tuple) -> tuple:
    """Normal numbers for every abstract argument, created where they live."""
    leaves, tree = jax.tree.flatten(arguments)
    shardings = [leaf.sharding for leaf in leaves]

    def create():
        keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))  # compiles fast
        pairs = zip(keys, leaves, strict=True)
        return [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in pairs]

    return jax.tree.unflatten(tree, jax.jit(create, out_shardings=shardings)())


def with_pullback(forward: Callable) -> Callable:
    """(y, *gradients) from the arguments of `forward` and dy."""

    def forward_and_backward(*arguments):
        *inputs, dy = arguments
        y, pullback = jax.vjp(forward, *inputs)
        return y, *pullback(dy)

    return forward_and_backward
