"""Experts on mesh axis `expert` equal a loop over all experts, however many tokens choose the same ones."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Plan, PlanPair, grid_of
from mstrain.gemm.expert_exchange import ExpertExchange
from mstrain.layers.dense import Kernel
from mstrain.layers.expert_rounds import exchanged
from mstrain.layers.experts import ExpertMlp
from tests.gemm.products import mesh_of
from tests.quick import QUICK

T, K, E, D, F = 192, 2, 8, 16, 24
ROUTINGS = {
    "even": lambda draw: (np.arange(T)[:, None] + [0, 3]) % E,
    "random": lambda draw: np.argsort(draw.random((T, E)), axis=1)[:, :K],
    "one device": lambda draw: np.argsort(draw.random((T, 2)), axis=1),  # experts 0 and 1
}


def loop_over_experts(x, weights, up, down, choices):
    y = jnp.zeros((T, D))
    for e in range(E):
        share = jnp.sum(weights * (choices == e), axis=1)[:, None]
        y = y + share * (jax.nn.silu(x @ up[e]) @ down[e])
    return y


def exchange_on(mesh: str) -> tuple[ExpertMlp, ExpertExchange]:
    plan = Plan("collective", "os", grid_of("collective", mesh_of(mesh)))
    tokens = T // plan.grid.size(plan.input_layout.tokens)
    return ExpertMlp(PlanPair(plan, plan), "silu", False, E), ExpertExchange(plan, E, K, 2, tokens)


def test_the_sum_over_chosen_experts_and_its_gradients():
    mlp, exchange = exchange_on("expert2-row1-col4")  # a token's two choices do not divide over four columns
    draw, grid = np.random.default_rng(0), exchange.plan.grid
    shapes = (T, D), (T, K), (E, D, F), (E, F, D), (T, D)
    x, weights, up, down, dy = (draw.standard_normal(shape, np.float32) for shape in shapes)

    def layer(x, weights, up, down, choices):
        return exchanged(mlp, exchange, (Kernel(up, None), Kernel(down, None), None), x, weights, choices)

    def with_gradients(function, choices):
        y, pullback = jax.vjp(lambda *inputs: function(*inputs, choices), x, weights, up, down)
        return y, *pullback(dy)

    placement = grid.sharding(P(exchange.plan.input_layout.tokens))
    both = jax.jit(lambda choices: (with_gradients(layer, choices), with_gradients(loop_over_experts, choices)))
    program = both.lower(jax.ShapeDtypeStruct((T, K), jnp.int32, sharding=placement)).compile(compiler_options=QUICK)
    for routing, choose in ROUTINGS.items():
        choices = jax.device_put(np.asarray(choose(draw), np.int32), placement)
        for found, right in zip(*program(choices), strict=True):
            np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5, err_msg=routing)


def test_what_a_slice_has_no_room_for_takes_as_many_rounds_as_the_fullest_device_needs():
    _, exchange = exchange_on("expert4-row1-col2")
    assert exchange.may_overflow and exchange.rows < 2 * exchange.tokens * K / exchange.slices
    assign = jax.jit(exchange.assign).lower(jax.ShapeDtypeStruct((T, K), jnp.int32)).compile(compiler_options=QUICK)
    for routing, rounds in {"even": 0, "one device": exchange.tokens * K // exchange.room - exchange.slices}.items():
        rows, found = assign(jnp.asarray(ROUTINGS[routing](np.random.default_rng(0)), jnp.int32))
        for own in np.asarray(rows).reshape(exchange.parts, -1):  # of one device
            assert len(set(own)) == len(own) and own.min() >= 0
        assert found == rounds
