"""Random parameters of a module: canonical, and as its plan stores them."""

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.layers.parameter import is_stored, partition_specs


def storages(boxed):
    """The `Storage` of every parameter of a boxed (possibly abstract) tree."""
    return jax.tree.map(lambda box: box.storage, boxed, is_leaf=is_stored)


def random_parameters(init, mesh, scale=1.0):
    """(storages, canonical parameters, stored ones on `mesh`) of a module, given its `init`."""
    boxed = jax.eval_shape(init, jax.random.key(0))["params"]
    rng, rules = np.random.default_rng(9), storages(boxed)
    canonical = jax.tree.map(lambda rule: jnp.asarray(scale * rng.standard_normal(rule.shape), "float32"), rules)

    def place(rule, x, spec):
        return jax.device_put(rule.from_canonical(x), jax.NamedSharding(mesh, spec))

    return rules, canonical, jax.tree.map(place, rules, canonical, partition_specs(boxed))
