"""The number of parameters of a model."""

import functools

import jax

from mstrain.layers.experts import BALANCE
from mstrain.models.config import ModelConfig
from mstrain.models.parameters import canonical_model_shapes


@functools.cache
def count_parameters(model: ModelConfig) -> int:
    """Exact number of parameters, from shapes, without allocation; biases of routers, which no gradient trains, do not
    count.

    Raises ValueError if the vocabulary is left to the tokenizer.
    """
    leaves = jax.tree_util.tree_leaves_with_path(canonical_model_shapes(model))
    return sum(leaf.size for path, leaf in leaves if BALANCE not in [getattr(key, "key", None) for key in path])
