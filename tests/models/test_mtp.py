"""Layers that predict further tokens: against a dense reference in NumPy, the same on any mesh, and what counts.

`tests.models.hub_parity` compares those of DeepSeek-V3 with transformers; `tests.training.parity mtp` trains on meshes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.commands.train import load_config
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.mtp import ahead, at_targets
from mstrain.models.parameters import canonical_shapes, from_canonical
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.step import objective
from tests.models.test_families import (
    VOCABULARY,
    B,
    T,
    batch,
    norm,
    reference_block,
    reference_features,
    reference_head,
)
from tests.quick import QUICK

# The width is padded on a mesh of 2 x 4, so every half of the product's inputs is.
MODEL = ModelConfig(
    layers=1, width=30, heads=4, num_kv_heads=2, head_dim=6, mlp_dim=24, vocab_size=VOCABULARY, norm="rmsnorm",
    norm_bias=False, position="rotary", activation="silu", gated=True, bias="none", mtp_layers=2,
)  # fmt: skip


@functools.cache
def module(mesh: str, parallel: ParallelConfig) -> Transformer:
    return Transformer(MODEL, make_plan(parallel, MODEL, make_mesh(parse_mesh(mesh)), B, T), T)


@functools.cache
def weights():
    draw = np.random.default_rng(7)

    def leaf(path, shape):
        return ((path[-1].key == "scale") + draw.normal(0, 0.2, shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, canonical_shapes(module("1x1", ParallelConfig("gspmd"))))


@functools.cache
def losses_and_gradients(mesh: str, parallel: ParallelConfig):
    """Losses [1 + mtp_layers, B * T], and canonical gradients of what a step minimizes."""
    net, (tokens, targets) = module(mesh, parallel), batch()

    def minimized(canonical):
        losses = net.apply({"params": from_canonical(net, canonical)}, tokens, targets, method="losses")
        return objective(net, jnp.mean(losses, axis=1)), losses

    with jax.default_matmul_precision("highest"):
        gradients, losses = jax.jit(jax.grad(minimized, has_aux=True), compiler_options=QUICK)(weights())
    return jax.device_get((losses, gradients))


def test_losses_of_further_tokens_agree_with_a_dense_reference():
    losses, _ = losses_and_gradients("1x1", ParallelConfig("gspmd"))
    params, (tokens, targets) = jax.tree.map(lambda x: np.asarray(x, np.float64), weights()), batch()
    x, known = reference_features(MODEL, params, tokens), targets.reshape(B, T)
    np.testing.assert_allclose(losses[0], reference_head(MODEL, params, x, targets), rtol=1e-5)
    for depth in (1, 2):
        p, embedded = params[f"mtp_{depth - 1}"], params["embedding"]["table"][known]
        pair = norm(MODEL, embedded, p["embedding_norm"]), norm(MODEL, x, p["hidden_norm"])
        x = reference_block(MODEL, p["block"], np.concatenate(pair, axis=-1) @ p["projection"]["kernel"], T)
        x, known = norm(MODEL, x, p["norm"]), np.pad(known[:, 1:], ((0, 0), (0, 1)))
        want = np.pad(reference_head(MODEL, params, x, known).reshape(B, T)[:, :-depth], ((0, 0), (depth, 0)))
        np.testing.assert_allclose(losses[depth], want.reshape(-1), rtol=1e-5)


def test_losses_and_gradients_do_not_depend_on_the_mesh():
    parallel = ParallelConfig(slices="2")
    plan = module("2x4", parallel).plan
    assert plan.mtp is not None and plan.mtp.slices == 2 and plan.width.stored > MODEL.width
    want, one = losses_and_gradients("1x1", ParallelConfig("gspmd"))
    found, mesh = losses_and_gradients("2x4", parallel)
    np.testing.assert_allclose(found, want, rtol=1e-5)

    def same(path, a, b):
        np.testing.assert_allclose(b, a, atol=1e-5 * np.abs(a).max(), err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(same, one, mesh)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one))


def test_a_loss_counts_where_its_target_is_in_the_same_sequence_and_segment():
    tokens, segments = np.arange(1, 13), np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 2, 2, 2])
    np.testing.assert_array_equal(ahead(tokens, 6), [2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12, 0])
    np.testing.assert_array_equal(at_targets(tokens, None, 2, 6), [0, 0, 1, 2, 3, 4, 0, 0, 7, 8, 9, 10])
    np.testing.assert_array_equal(at_targets(tokens, segments, 1, 6), [0, 1, 2, 0, 4, 5, 0, 7, 0, 0, 10, 11])


def test_a_mistake_names_what_to_type():
    for changes, message in (
        (dict(mtp_layers=-1), "0 for none"),
        (dict(mtp_loss=0.0), "a factor above 0"),
        (dict(mtp_layers=0, mtp_loss=0.1), "has no effect without model.mtp_layers. Type model.mtp_layers=1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(MODEL, **changes)
    with pytest.raises(ValueError, match="beyond sequences of seq=2"):
        load_config(["model=tiny", "model.mtp_layers=2", "seq=2"])
