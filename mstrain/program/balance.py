"""The load of experts in a training step: measured, reported, and kept even by biases of the routers.

The gradient of a router's parameter `balance` is the load of its experts (`mstrain.layers.router.choose`), summed over
microbatches, copies and stages as all gradients are. A step takes it out, so norm, clipping and optimizer see zeros.
"""

import jax
import jax.numpy as jnp

from mstrain.layers.experts import BALANCE
from mstrain.models.transformer import Transformer


def take_loads(module: Transformer, gradients):
    """(gradients with zeros for `balance`, loads float32 [L, E] in the order of the layers); no loads without experts.

    A load is the number of an expert's choices over the mean of all experts.
    """
    if not module.model.experts:
        return gradients, None
    groups = [gradients[f"blocks_{i}"]["mlp"][BALANCE] for i in range(len(module.plan.groups))]
    loads, rows = jnp.concatenate(groups), module.plan.rows
    if rows:
        loads = loads[jnp.array([rows.index(layer) for layer in range(max(rows) + 1)])]

    def without(path, x):
        return jnp.zeros_like(x) if path[-1].key == BALANCE else x

    return jax.tree_util.tree_map_with_path(without, gradients), loads


def load_metrics(loads) -> dict:
    """The mean load of every expert over the layers, [E], and the largest of all layers and experts."""
    return {} if loads is None else {"expert_load": jnp.mean(loads, axis=0), "expert_load_max": jnp.max(loads)}


def shift_biases(module: Transformer, params, gradients):
    """`params` with biases of routers raised for experts that had less than the mean load, and lowered for others.

    `gradients` have the loads. Wang et al., 2024, "Auxiliary-loss-free load balancing strategy".
    """
    rate = module.model.balance_rate
    if not rate:
        return params

    def shifted(path, x, load):
        if path[-1].key != BALANCE:
            return x
        return jnp.where(jnp.sum(load, axis=-1, keepdims=True) > 0, x + rate * jnp.sign(1 - load), x)

    return jax.tree_util.tree_map_with_path(shifted, params, gradients)
