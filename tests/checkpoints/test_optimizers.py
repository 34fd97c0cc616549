"""Moments of every optimizer are sharded as their parameters and saved in canonical order, masked ones too."""

import jax
import numpy as np
import optax
import pytest

from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.models import parameters
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import abstract_state, map_copies, state_shardings
from tests.checkpoints.test_checkpoints import STEP, module_on, random_state


def is_matrix(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)


def labels(params):
    return jax.tree.map(lambda matrix: "matrix" if matrix else "vector", is_matrix(params))


def without_embedding(params):
    return {name: name != "embedding" for name in params}  # a prefix of the tree of parameters


OPTIMIZERS = {
    "masked": optax.masked(optax.adam(1e-3), is_matrix),
    "masked by prefix": optax.masked(optax.adam(1e-3), without_embedding),
    "partition": optax.transforms.partition({"matrix": optax.adam(1e-3), "vector": optax.sgd(1e-3, 0.9)}, labels),
    "multi_transform": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"matrix": optax.lion(1e-3), "vector": optax.adamw(1e-3)}, labels),
        optax.ema(0.9),
    ),
    "muon in bf16": make_optimizer(OptimizerConfig("muon", moments="bf16", learning_rate=1e-3)),
}
ADAFACTOR = make_optimizer(OptimizerConfig("adafactor", learning_rate=1e-3))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_moment_of_a_matrix_is_sharded_as_the_matrix(name):
    module, optimizer = module_on("2x4", slices="2", layers="1:fsdp"), OPTIMIZERS[name]
    shapes = parameters.parameter_shapes(module)
    state = jax.eval_shape(optimizer.init, shapes)
    shardings = state_shardings(module, optimizer)
    keystr = jax.tree_util.keystr
    wanted = jax.tree_util.tree_leaves_with_path(parameters.parameter_shardings(module))
    leaves = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings["optimizer"]), strict=True)
    found = [(keystr(path), sharding) for (path, x), sharding in leaves if x.ndim]
    assert len(found) > 3
    for path, sharding in found:
        parameter, expected = next((p, s) for p, s in wanted if path.endswith(keystr(p)))
        assert sharding == expected and (any(sharding.spec) or parameter[-1].key not in ("kernel", "table"))


def test_factored_moments_are_sharded_over_all_devices():
    module = module_on("2x4", slices="2", layers="1:fsdp")
    moments = abstract_state(module, ADAFACTOR)["optimizer"]
    kernels = [
        (jax.tree_util.keystr(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(moments)
        if ("v_row" in (text := jax.tree_util.keystr(path)) or "v_col" in text) and x.size > 2
    ]
    assert len(kernels) == 10  # of four kernels of each layer and of the table
    for path, x in kernels:
        assert x.sharding.num_devices == 8
        divides = x.shape[-1] % 8 == 0  # 61 tokens do not
        assert x.sharding.is_fully_replicated != divides, path


@pytest.mark.parametrize("name", [*OPTIMIZERS, "adafactor"])
def test_moments_arrive_bit_for_bit_on_another_mesh(name, tmp_path):
    optimizer = OPTIMIZERS.get(name, ADAFACTOR)
    before, after = module_on("2x4", slices="2"), module_on("2x2x2", dataflow="rs", layers="1:fsdp")
    canonical, state = random_state(before, optimizer)
    checkpoints = Checkpoints(tmp_path / "checkpoints", None)
    checkpoints.save(STEP, state, before, optimizer, {})
    checkpoints.wait()
    restored = checkpoints.restore(STEP, after, optimizer)
    checkpoints.close()
    wanted = abstract_state(after, optimizer)["optimizer"]
    assert jax.tree.structure(restored["optimizer"]) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim) or pytest.fail(),
        restored["optimizer"],
        wanted,
    )
    back = map_copies(lambda tree: parameters.to_canonical(after, tree), restored, optimizer)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), canonical)
