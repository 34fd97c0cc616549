"""A scan over equal layers whose kernels are sharded over data-parallel replicas (`shard=parameters`).

Iteration i computes layer i with weights that iteration i - 1 gathered, and gathers those of layer i + 1. The backward
scan does the same in reverse order and sums the weight gradients of layer i + 1, which iteration i + 1 left in the
carry, by reduce_scatter. No collective of weights depends on the compute of its iteration, so a scheduler can run them
side by side. At most two layers have gathered weights at a time.

The scan has its own derivative: JAX's would save the gathered weights of all layers. `remat=` determines what else a
layer saves, as in the scan of Flax. Weight gradients before their sum reach the carry as gradients of `sinks`, a Flax
collection of zeros with a leading dim of replicas (`mstrain.gemm.linear`).
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import copies_of, data_dim, gathered_spec, sum_copies
from mstrain.layers.parameter import is_stored
from mstrain.models.plan import BlockPlan
from mstrain.models.products import HALVES, MLP, SHARED
from mstrain.models.sharding import gather_parameter, is_kernel, sharded_box, to_shard


def scan_layers(block: nn.Module, plan: BlockPlan, params, x_TxD, windows, segments_T):
    """x_TxD after the layers of `plan` with stacked parameters `params`, of which only kernels are sharded over `data`.

    `block(x_TxD, window, segments_T)` is one layer without parent; `windows` has one element per layer.
    """
    layers = _Layers(block, layer_shardings(block, plan, params, x_TxD, windows[0], segments_T), plan, len(windows))
    trees: dict[str, Any] = {}  # of what a layer saves; the forward scan is always traced first

    @jax.custom_vjp
    def run(params, x, windows, segments):
        def advance(carry, i):
            x, weights = carry
            following = layers.gather(params, jnp.minimum(i + 1, layers.count - 1), x.dtype)
            return (layers.apply(weights, {}, x, windows[i], segments), following), None

        return lax.scan(advance, (x, layers.gather(params, 0, x.dtype)), jnp.arange(layers.count))[0][0]

    def forward(params, x, windows, segments):
        def advance(carry, i):
            x, weights = carry
            following = layers.gather(params, jnp.minimum(i + 1, layers.count - 1), x.dtype)
            function = functools.partial(layers.apply, window=windows[i], segments=segments)
            y, pullback = jax.vjp(function, weights, layers.sinks(weights), x)
            saved, trees["pullback"] = split(pullback, (weights, segments))
            return (y, following), saved

        carry, saved = lax.scan(advance, (x, layers.gather(params, 0, x.dtype)), jnp.arange(layers.count))
        return carry[0], (params, segments, carry[1], saved)  # the last layer's weights, gathered twice

    def backward(kept, dy):
        params, segments, weights, saved = kept

        def advance(carry, step):
            (dy, weights, partial, gradients), (i, saved) = carry, step
            following = layers.gather(params, jnp.maximum(i - 1, 0), dy.dtype)
            gradients = layers.store_sums(gradients, partial, jnp.minimum(i + 1, layers.count - 1))
            pullback = join(trees["pullback"], saved, (weights, segments))
            whole, partial, dx = pullback(dy)
            return (dx, following, partial, layers.store_whole(gradients, whole, i)), None

        zeros = jax.tree.map(jnp.zeros_like, layers.sinks(weights))
        carry = (dy, weights, zeros, jax.tree.map(jnp.zeros_like, params))
        steps = jnp.arange(layers.count), saved
        (dx, _, partial, gradients), _ = lax.scan(advance, carry, steps, reverse=True)
        return layers.store_sums(gradients, partial, 0), dx, None, None

    run.defvjp(forward, backward)
    return run(params, x_TxD, windows, segments_T)


def extend_layers(block: nn.Module, plan: BlockPlan, params, x_TxD, windows, past):
    """(x_TxD, KeysValues of every layer) for tokens after `past`, without a backward pass; arguments as in
    `scan_layers`. Each layer is gathered when it runs."""
    layers = _Layers(block, layer_shardings(block, plan, params, x_TxD, windows[0], None), plan, len(windows))

    def advance(x, step):
        i, window, own = step
        return block.apply({"params": layers.gather(params, i, x.dtype)}, x, window, None, own)

    return lax.scan(advance, x_TxD, (jnp.arange(layers.count), windows, past))


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers of one scan: `shardings` of the parameters of one layer, `count` of them."""

    block: nn.Module
    shardings: Any
    plan: BlockPlan
    count: int

    def apply(self, weights, sinks, x, window, segments):
        return self.block.apply({"params": weights, "sinks": sinks}, x, window, segments)[0]

    def gather(self, params, i, dtype):
        """The gathered parameters of layer `i`."""
        return gather_layer(params, self.shardings, i, dtype)

    def sinks(self, weights):
        """Zeros for the gradient of every sharded kernel in every replica; none if JAX differentiates its product."""
        found: dict = {}
        for path, weight in jax.tree_util.tree_leaves_with_path(weights):
            keys = [part.key for part in path]
            if self._has_sink(keys):
                place = functools.reduce(lambda tree, key: tree.setdefault(key, {}), keys[:-1], found)
                sharding = self._of(keys)
                axes = copies_of(sharding.spec)
                copies = self.plan.attention.grid.size(axes)
                whole = NamedSharding(sharding.mesh, P(axes, *gathered_spec(sharding.spec)))
                place[keys[-1]] = lax.with_sharding_constraint(jnp.zeros((copies, *weight.shape), weight.dtype), whole)
        return found

    def store_sums(self, gradients, partial, i):
        """`gradients` with the sums over replicas of the `partial` gradients of layer `i`."""

        def store(path, stack):
            keys = [part.key for part in path]
            if not self._has_sink(keys):
                return stack
            return self._store(stack, _sum(functools.reduce(operator.getitem, keys, partial), self._of(keys)), keys, i)

        return jax.tree_util.tree_map_with_path(store, gradients)

    def store_whole(self, gradients, whole, i):
        """`gradients` with those of layer `i` that are already summed."""

        def store(path, stack, gradient):
            keys = [part.key for part in path]
            return stack if self._has_sink(keys) else self._store(stack, to_shard(gradient, self._of(keys)), keys, i)

        return jax.tree_util.tree_map_with_path(store, gradients, whole)

    def _store(self, stack, gradient, keys, i):
        sharding = self._of(keys)
        stack = lax.dynamic_update_index_in_dim(stack, gradient, i, 0)
        return lax.with_sharding_constraint(stack, NamedSharding(sharding.mesh, P(None, *sharding.spec)))

    def _of(self, keys) -> NamedSharding:
        return functools.reduce(operator.getitem, keys, self.shardings)

    def _has_sink(self, keys) -> bool:
        half = MLP if keys[0] == SHARED else keys[0]
        if half not in HALVES or keys[-1] != "kernel" or data_dim(self._of(keys).spec) is None:
            return False
        return getattr(self.plan, half).into.kind.product is None


def gather_layer(params, shardings, i, dtype):
    """The parameters of layer `i` of stacks [L, ...], gathered; `shardings` are from `layer_shardings`."""
    one = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), params)
    one = jax.tree.map(lax.with_sharding_constraint, one, shardings)

    def gathered(path, x, sharding):
        return gather_parameter(path, x, sharding, dtype) if is_kernel(path) else x

    return jax.tree_util.tree_map_with_path(gathered, one, shardings)


def layer_shardings(block: nn.Module, plan: BlockPlan, params, x, window, segments):
    """The shardings of the parameters of one layer of the stacks `params`, which takes arrays of these shapes; those
    that are not kernels are gathered."""
    shapes = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, window, segments)]
    boxes = jax.eval_shape(block.init, jax.random.key(0), *shapes)["params"]

    def sharding(path, box, stack):
        if is_kernel(path):
            return NamedSharding(plan.mesh, sharded_box(box, plan.mesh).spec)
        rows = (box.tokens,) if stack.ndim > box.value.ndim + 1 else ()  # of `mstrain.models.vectors`
        return NamedSharding(plan.mesh, P(*rows, *box.spec))

    return jax.tree_util.tree_map_with_path(sharding, boxes, params, is_leaf=is_stored)


def _sum(partial, sharding: NamedSharding):
    """The float32 shard of the sum of `partial` [replicas, ...]."""
    local = jax.shard_map(
        lambda x: sum_copies(x[0].astype(jnp.float32), sharding.spec),
        mesh=sharding.mesh,
        in_specs=P(copies_of(sharding.spec), *gathered_spec(sharding.spec)),
        out_specs=sharding.spec,
        check_vma=False,
    )
    return local(partial)


def split(pullback, known):
    """(the arrays that `pullback` holds without those in `known`, what `join` needs to put them back)."""
    leaves, tree = jax.tree.flatten(pullback)
    places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
    places = [places.get(id(leaf)) for leaf in leaves]
    return [leaf for leaf, place in zip(leaves, places, strict=True) if place is None], (tree, places)


def join(tree_and_places, saved, known):
    """The pullback from `saved` of `split` and the same `known` arrays."""
    (tree, places), saved, known = tree_and_places, iter(saved), jax.tree.leaves(known)
    return jax.tree.unflatten(tree, [next(saved) if place is None else known[place] for place in places])
