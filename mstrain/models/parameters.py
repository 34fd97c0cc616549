"""Parameters in two forms: canonical, as checkpoints carry them, and stored, as a plan runs them.

Canonical parameters are whole in the model's own order, every layer stacked in `blocks_0`. Stored ones follow the plan: layers
split into its groups, every parameter reordered by its `Storage`. Both ways are permutations (and zero padding), so
a round trip is exact, and initial values do not depend on mesh, algorithm or slice count.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.layers.parameter import partition_specs, storages
from mstrain.models.plan import canonical_plan
from mstrain.models.transformer import Transformer

STACK = "blocks_0"  # Linen's name of the first group; the only one of canonical parameters


def abstract_parameters(module: Transformer):
    """Boxed abstract parameters of `module`; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((module.seq * _sequences(module),), jnp.int32)
    return jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]


def parameter_shardings(module: Transformer):
    """Sharding of every stored parameter."""
    specs = partition_specs(abstract_parameters(module))
    return jax.tree.map(lambda spec: NamedSharding(module.plan.mesh, spec), specs)


def canonical_shapes(module: Transformer):
    """Abstract canonical parameters of the same model."""
    return jax.eval_shape(lambda: init_canonical(module, 0))


def init_canonical(module: Transformer, seed: int):
    """Canonical initial parameters, a pure function of the model and the seed."""
    canonical = Transformer(module.model, canonical_plan(module.model), seq=1)
    boxed = canonical.init(jax.random.key(seed), jnp.zeros((1,), jnp.int32))["params"]
    return jax.tree.map(lambda box: box.value, boxed, is_leaf=lambda x: hasattr(x, "storage"))


def init_parameters(module: Transformer, seed: int):
    """Initial parameters of `module`, created where they live."""

    def create():
        return store(module, init_canonical(module, seed))

    return jax.jit(create, out_shardings=parameter_shardings(module))()


def store(module: Transformer, canonical):
    """Canonical parameters to the form `module` runs."""
    rules = storages(abstract_parameters(module))
    stored, first = {}, 0
    for name, rule in rules.items():
        if name.startswith("blocks_"):
            continue
        stored[name] = _apply(rule, canonical[name], "store")
    for i, (_, count) in enumerate(module.plan.groups):
        group = jax.tree.map(lambda x, a=first, n=count: x[a : a + n], canonical[STACK])
        stored[f"blocks_{i}"] = _apply(rules[f"blocks_{i}"], group, "store")
        first += count
    return stored


def restore(module: Transformer, stored):
    """The form `module` runs to canonical parameters."""
    rules = storages(abstract_parameters(module))
    parts = {name: _apply(rule, stored[name], "restore") for name, rule in rules.items()}
    groups = [parts.pop(f"blocks_{i}") for i in range(len(module.plan.groups))]
    stack = groups[0] if len(groups) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *groups)
    return {**parts, STACK: stack}


def canonical_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Spreads a canonical array over every tensor-parallel device, on the last dims that divide."""
    spec: list = [None] * len(shape)
    left = ["row", "col"]
    for dim in reversed(range(len(shape))):
        take = []
        for axis in list(left):
            size = mesh.shape[axis]
            for taken in take:
                size *= mesh.shape[taken]
            if shape[dim] % size == 0:
                take.append(axis)
                left.remove(axis)
        spec[dim] = tuple(take) or None
    return NamedSharding(mesh, P(*spec))


def _apply(rules, tree, direction: str):
    return jax.tree.map(lambda rule, x: getattr(rule, direction)(x), rules, tree)


def _sequences(module: Transformer) -> int:
    """Fewest sequences that divide over every device, so that shapes can be traced."""
    return module.plan.mesh.size
