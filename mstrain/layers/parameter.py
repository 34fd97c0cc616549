"""Parameters with their partition spec and storage order as Linen metadata.

A parameter is initialized in canonical order and then converted to its `Storage`, so its values do not depend on mesh,
algorithm or slice count. The abstract parameter tree is a tree of `Stored` boxes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Layout, Storage


class Stored(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter in stored order with its partition spec and storage; `tokens` are the mesh axes that shard the tokens
    to which a vector is applied."""

    value: Any
    spec: P = struct.field(pytree_node=False)
    storage: Storage = struct.field(pytree_node=False)
    tokens: tuple[str, ...] = struct.field(pytree_node=False, default=())

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict):
        return self.replace(spec=P(*self.spec[:index], None, *self.spec[index:]))

    def remove_axis(self, index: int, params: dict):
        return self.replace(spec=P(*self.spec[:index], *self.spec[index + 1 :]))


def parameter(module: nn.Module, name: str, init: Callable, storage: Storage, spec: P) -> jax.Array:
    """Declares float32 parameter `name` of canonical shape `storage.shape`, in stored order, sharded as `spec`."""

    def boxed_init(key):
        return Stored(storage.from_canonical(init(key, storage.shape)), spec, storage)

    return nn.meta.unbox(module.param(name, boxed_init))


def vector(module: nn.Module, name: str, init: Callable, storage: Storage, layout: Layout) -> jax.Array:
    """Declares float32 `name`, a parameter [F] for the features of `layout`, sharded as these.

    Returns [1, F], or [N, F] if it has a row for every shard of tokens (`mstrain.models.vectors`).
    """

    def boxed_init(key):
        value = storage.from_canonical(init(key, storage.shape))
        return Stored(value, P(layout.features or None), storage, layout.tokens)

    if module.has_variable("params", name):
        value = module.get_variable("params", name)
        if isinstance(value, jax.Array) and value.ndim == 2:
            return value
    return nn.meta.unbox(module.param(name, boxed_init))[None]


def vector_spec(vector_NxF, layout: Layout) -> P:
    """The sharding of a `vector`."""
    return P(layout.tokens if len(vector_NxF) > 1 else None, layout.features or None)


def unless_initializing(module: nn.Module, compute: Callable[[], Any], shape: tuple[int, ...], dtype) -> Any:
    """`compute()`; while `module` is initialized, zeros of the shape and dtype of its result.

    Initial values do not depend on activations, and to trace products and attention takes most of `init`'s time.
    """
    return jnp.zeros(shape, dtype) if module.is_initializing() else compute()


def is_stored(x) -> bool:
    return isinstance(x, Stored)


def partition_specs(boxed: Any) -> Any:
    """The `PartitionSpec` of every parameter in a tree of `Stored` boxes."""
    return jax.tree.map(lambda box: box.spec, boxed, is_leaf=is_stored)
