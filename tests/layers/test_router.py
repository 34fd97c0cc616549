"""Routers: choices and weights, the gradients that keep the load even, loads, and options that are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.gemm import Plan, grid_of
from mstrain.gemm.grouping import group_choices
from mstrain.layers.router import RouterConfig, choose
from mstrain.models.config import ModelConfig
from mstrain.models.latent import LatentConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from tests.gemm.products import mesh_of
from tests.quick import QUICK

T, E, K = 16, 4, 2
LOGITS = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)
CONFIG = RouterConfig(E, K)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


@pytest.mark.parametrize("scores, normalized", [("softmax", True), ("softmax", False), ("sigmoid", True)])
def test_the_best_experts_are_chosen_with_their_scores(scores, normalized):
    config = RouterConfig(E, K, scores, normalized, scale=2.5)
    weights, choices = choose(LOGITS, jnp.zeros(E), config)
    every = softmax(LOGITS) if scores == "softmax" else 1 / (1 + np.exp(-LOGITS))
    best = np.argsort(-LOGITS, axis=1)[:, :K]
    expected = np.take_along_axis(every, best, 1)
    expected = expected / expected.sum(1, keepdims=True) if normalized else expected
    np.testing.assert_array_equal(choices, best)
    np.testing.assert_allclose(weights, 2.5 * expected, rtol=1e-5)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_are_chosen_from_the_best_groups_only(scores):
    """Groups are compared by their best expert, or with sigmoid by the sum of their best two."""
    logits, balance = np.random.default_rng(1).standard_normal((2, 64, 8)).astype(np.float32)
    balance = 0.5 * balance[0]
    _, choices = choose(logits, balance, RouterConfig(8, 3, scores, groups=(4, 2)))
    every = (softmax(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))) + balance
    of_groups = every.reshape(64, 4, 2).max(2) if scores == "softmax" else every.reshape(64, 4, 2).sum(2)
    allowed = np.repeat(of_groups >= np.sort(of_groups, 1)[:, 2:3], 2, axis=1)
    np.testing.assert_array_equal(choices, np.argsort(-np.where(allowed, every, -9), axis=1)[:, :3])
    assert np.any(np.sort(choices, 1) != np.sort(np.argsort(-every, 1)[:, :3], 1))


def test_a_bias_changes_the_choice_and_not_the_weights():
    weights, choices = choose(LOGITS, jnp.array([9.0, 0, 0, 0]), RouterConfig(E, K, normalized=False))
    assert np.all(np.asarray(choices[:, 0]) == 0)
    np.testing.assert_allclose(weights[:, 0], softmax(LOGITS)[:, 0], rtol=1e-5)


def test_losses_add_the_gradient_of_their_formula_and_leave_the_value():
    counted = np.arange(T) < 10  # the others are padding
    config = dataclasses.replace(CONFIG, balance_loss=0.3, z_loss=0.1)

    def value(logits, balance, config):
        return jnp.sum(choose(logits, balance, config, counted)[0] ** 2)

    plain, (slope, load) = jax.value_and_grad(value, (0, 1))(LOGITS, jnp.zeros(E), CONFIG)
    same, (more, again) = jax.value_and_grad(value, (0, 1))(LOGITS, jnp.zeros(E), config)
    counts = np.bincount(np.argsort(-LOGITS[counted], axis=1)[:, :K].reshape(-1), minlength=E)
    share = counts / counts.sum()

    def losses(logits):
        z = jax.nn.logsumexp(logits[counted], axis=1)
        return 0.3 * E * jnp.mean(jax.nn.softmax(logits[counted], axis=1), axis=0) @ share + 0.1 * jnp.mean(z**2)

    assert plain == same
    np.testing.assert_allclose(load, E * share, rtol=1e-6)
    np.testing.assert_array_equal(load, again)
    np.testing.assert_allclose(more - slope, jax.grad(losses)(jnp.asarray(LOGITS)), atol=1e-6)


@pytest.mark.parametrize("capacity", [0, 5, T * K])
def test_a_capacity_drops_the_last_tokens_on_any_mesh(capacity):
    choices = np.argsort(-LOGITS, axis=1)[:, :K].astype(np.int32)
    rank = np.array([np.sum(choices.reshape(-1)[:i] == e) for i, e in enumerate(choices.reshape(-1))])
    plan = Plan("collective", "os", grid_of("collective", mesh_of("2x2x2")))
    program = jax.jit(lambda choices: group_choices(choices, E, plan, capacity), compiler_options=QUICK)
    groups = program(choices)
    rows, sizes = np.asarray(groups.rows).reshape(4, -1), np.asarray(groups.sizes).reshape(4, E)
    np.testing.assert_array_equal(rows.reshape(-1) < rows.shape[1], rank < capacity)
    np.testing.assert_array_equal(sizes.sum(0), np.minimum(np.bincount(choices.reshape(-1), minlength=E), capacity))
    for own, chosen, sorted_choices in zip(rows, choices.reshape(4, -1), np.asarray(groups.choices).reshape(4, -1)):
        kept = own < len(own)
        np.testing.assert_array_equal(sorted_choices[own[kept]], np.flatnonzero(kept))
        assert np.all(np.diff(chosen[sorted_choices[sorted_choices < len(own)]]) >= 0)


@pytest.mark.parametrize("wrong, message", [
    ({"experts_per_token": 5}, "experts_per_token=5 is not from 1 to the 4 experts"),
    ({"router": "hash"}, "model.router='hash' is unknown. Choose one of softmax, sigmoid"),
    ({"experts": 0}, "model.experts=0 must be at least 1"),
    ({"experts": None, "balance_loss": 0.1}, "balance_loss=0.1 has no effect: the MLP is dense"),
    ({"router_scale": 0.0}, "router_scale=0.0 must be above 0"),
    ({"expert_capacity": 0.0}, "expert_capacity=0.0 must be above 0"),
    ({"bias": "all", "expert_capacity": 1.0}, "Type model.expert_capacity=null"),
    ({"router_groups": 3}, r"router_groups=3 does not divide 4 experts into groups. Choose one of \[1, 2, 4\]"),
    ({"router": "sigmoid", "router_groups": 4}, r"router_groups=4 .* groups of two or more. Choose one of \[1, 2\]"),
    ({"router_groups": 4}, "router_best_groups=1 is not from 2, .* to the 4 groups"),
    ({"dense_layers": 1}, "dense_layers=1 with model.dense_mlp_dim=None: type"),
    ({"latent": LatentConfig(key_rank=8, rotary_dim=32)}, "rotary_dim=32 must be even and less than .*head_dim=32"),
    ({"latent": LatentConfig(value_dim=8)}, "model.latent has no effect"),
])  # fmt: skip
def test_a_wrong_router_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"experts": 4, "bias": "none", **wrong})


def test_a_dataflow_that_an_algorithm_lacks_is_refused():
    model = ModelConfig(experts=4, bias="none", vocab_size=64)
    with pytest.raises(ValueError, match="parallel.dataflow=os or ls, or parallel.mlp=collective"):
        make_plan(ParallelConfig("wang", dataflow="rs"), model, mesh_of("2x4"), 8, 16)


def test_a_capacity_counts_no_padding():
    """Padded sequences would raise the mean load, so a mesh that pads would drop fewer tokens than others."""
    model = ModelConfig(experts=4, bias="none", vocab_size=64, expert_capacity=1.0)
    with pytest.raises(ValueError, match="expert_capacity=1.0 would count padding: 12 sequences .* multiple of 8"):
        make_plan(ParallelConfig("collective"), model, mesh_of("8x1"), 12, 16)
    make_plan(ParallelConfig("collective"), model, mesh_of("4x2"), 12, 16)
    make_plan(ParallelConfig("collective"), dataclasses.replace(model, expert_capacity=None), mesh_of("8x1"), 12, 16)
