"""The feed-forward half on a mesh, in every dataflow, against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mstrain.gemm import Plan, PlanPair, Span, grid_of
from mstrain.layers.dense import Inits
from mstrain.layers.gated_kernel import activate_scaled, fits
from mstrain.layers.mlp import ACTIVATIONS, Mlp, gate_of
from tests.gemm.products import mesh_of
from tests.layers.random_parameters import random_parameters
from tests.quick import QUICK

TOKENS, WIDTH, HIDDEN = 24, 24, 48


def pair_on(mesh, algorithm, into, out):
    grid = grid_of(algorithm, mesh_of(mesh))
    slices = 3 if algorithm == "meshslice" else 1
    return PlanPair(
        Plan(algorithm, into, grid, slices),
        Plan(algorithm, out, grid.swapped if out == "rs" else grid, slices),
    )


def formula(params, x, activation, gated):
    up, down = params["up"], params["down"]
    h = x @ up["kernel"] + up["bias"]
    activate = ACTIVATIONS[activation]
    h = activate(h[:, :HIDDEN]) * h[:, HIDDEN:] if gated else activate(h)
    return h @ down["kernel"] + down["bias"]


@pytest.mark.parametrize(
    "mesh, algorithm, into, out, activation, gated",
    [
        ("2x4", "meshslice", "os", "ls", "silu", True),
        ("4x2", "meshslice", "ls", "os", "gelu", True),
        ("2x4", "meshslice", "rs", "rs", "gelu_tanh", True),
        ("2x4", "megatron", "rs", "rs", "relu", False),
        ("2x2x2", "cannon", "os", "os", "silu", True),
    ],
)
def test_mlp_equals_its_formula(mesh, algorithm, into, out, activation, gated):
    pair = pair_on(mesh, algorithm, into, out)
    inits = Inits(nn.initializers.zeros, nn.initializers.zeros)
    module = Mlp(pair, Span(WIDTH), Span(HIDDEN), activation, gated, True, inits)
    rng = np.random.default_rng(8)
    x, g = (
        jax.device_put(rng.standard_normal((TOKENS, WIDTH), np.float32), pair.grid.sharding(pair.residual.spec))
        for _ in range(2)
    )
    rules, canonical, stored = random_parameters(lambda key: module.init(key, x), pair.grid.mesh)

    def program(params, x, g):
        y, backward = jax.vjp(lambda p, x: module.apply({"params": p}, x), params, x)
        return y, *backward(g)

    y, slopes, dx = jax.jit(program).lower(stored, x, g).compile(compiler_options=QUICK)(stored, x, g)
    slopes = jax.tree.map(lambda rule, slope: rule.to_canonical(slope), rules, slopes)
    want, backward = jax.vjp(lambda p, x: formula(p, x, activation, gated), canonical, np.asarray(x))
    for a, b in zip(jax.tree.leaves((y, slopes, dx)), jax.tree.leaves((want, *backward(np.asarray(g)))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "clamped_swiglu"])
def test_the_kernel_of_experts_on_tpus_has_the_gradients_of_the_formula(activation):
    """Blocks of rows and of columns, more than one of each; the kernel is interpreted."""
    rows, features = 272, 1152
    draw = np.random.default_rng(0)
    h = jnp.asarray(4 * draw.normal(size=(rows, 2 * features)), jnp.bfloat16)
    scales = jnp.asarray(draw.uniform(size=rows), jnp.float32)
    dy = jnp.asarray(draw.normal(size=(rows, features)), jnp.bfloat16)
    assert fits(h) and not fits(h.astype(jnp.float32)) and not fits(h[:, :300]) and not fits(h[:7])

    def in_float32(h, scales):
        return gate_of(activation)(*jnp.split(h, 2, axis=1)) * scales[:, None]

    def kernel(h, scales):
        return activate_scaled(h, scales, gate_of(activation), True)

    expected, back = jax.vjp(in_float32, h.astype(jnp.float32), scales)
    found, kernel_back = jax.vjp(kernel, h, scales)
    pairs = [(found, expected), *zip(kernel_back(dy), back(dy.astype(jnp.float32)), strict=True)]
    for value, right in pairs:
        scale = float(jnp.max(jnp.abs(right)))
        np.testing.assert_allclose(np.asarray(value, np.float32) / scale, right / scale, atol=2**-7)
