"""Norms: parity with float64, finite under a large mean, the same numbers on a sharded feature dim."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mstrain.gemm import Layout, Span
from mstrain.layers.norm import Norm, NormConfig, normalize
from tests.gemm.products import mesh_of
from tests.quick import QUICK


def rule(kind, mesh="1x1", layout=Layout((), ()), width=256):
    return NormConfig(kind, layout, mesh_of(mesh), Span(width))


def reference(x, kind, epsilon=1e-5):
    x = np.asarray(x, np.float64)
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def shifted(mean, dtype):
    """Standard deviation 1, mean as given, rounded to dtype."""
    x = np.random.default_rng(1).standard_normal((16, 256)) + mean
    return jnp.asarray(x, dtype)


@functools.cache
def value_and_gradient(kind):
    """A program of x: its norm y, and the gradient of x where that of y is y."""
    norm, params = Norm(rule(kind), bias=True), {"scale": jnp.ones(256), "bias": jnp.zeros(256)}

    def program(x):
        y, backward = jax.vjp(lambda x: norm.apply({"params": params}, x), x)
        return y, *backward(y)

    return jax.jit(program, compiler_options=QUICK)


@pytest.mark.parametrize("dtype, rounding", [("float32", 2**-24), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("mean", [0, 30, 300])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_is_exact_and_finite_under_a_large_mean(kind, mean, dtype, rounding):
    """The result is rounded once to its dtype; float32 statistics may be off by 1e-4."""
    x = shifted(mean, dtype)
    y, dx = value_and_gradient(kind)(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), reference(x, kind), rtol=rounding, atol=1e-4)
    assert np.isfinite(np.asarray(dx, np.float32)).all()


def test_variance_in_one_pass_would_fail_where_ours_holds():
    """The control: E[x^2] - E[x]^2 in float32 cancels at mean / sd = 3000."""
    x = shifted(3000, "float32")
    one_pass = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        (x * x).mean(-1, keepdims=True) - jnp.square(x.mean(-1, keepdims=True)) + 1e-5
    )
    exact = reference(x, "layernorm")
    assert not np.allclose(one_pass, exact, atol=1e-2)
    np.testing.assert_allclose(normalize(x, "layernorm", 1e-5), exact, atol=1e-2)


@pytest.mark.parametrize(
    "kind, ours, theirs",
    [
        ("layernorm", {"bias": True}, nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)),
        ("rmsnorm", {}, nn.RMSNorm(epsilon=1e-5)),
        ("rmsnorm", {"unit_offset": True}, nn.RMSNorm(epsilon=1e-5)),
    ],
    ids=("layernorm", "rmsnorm", "unit_offset"),
)
def test_sharded_values_and_gradients_equal_flax(kind, ours, theirs):
    mesh, layout = mesh_of("2x4"), Layout(("data", "row"), ("col",))
    norm = Norm(rule(kind, "2x4", layout, width=64), **ours)
    rng = np.random.default_rng(2)
    x, g = (jnp.asarray(rng.standard_normal((16, 64)), jnp.float32) for _ in range(2))
    scale, bias = (jnp.asarray(1 + rng.standard_normal(64) / 4, jnp.float32) for _ in range(2))
    params = {"scale": scale, "bias": bias} if ours.get("bias") else {"scale": scale}
    flax_params = {**params, "scale": scale + 1} if ours.get("unit_offset") else params

    def both(module, params):
        y, backward = jax.vjp(lambda p, x: module.apply({"params": p}, x), params, x_on_mesh)
        return y, backward(g)

    x_on_mesh = jax.device_put(x, jax.NamedSharding(mesh, layout.spec))
    compiled = jax.jit(lambda: (both(norm, params), both(theirs, flax_params))).lower().compile(compiler_options=QUICK)
    for a, b in zip(*map(jax.tree.leaves, compiled()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_initial_scale_is_one_either_way():
    x = shifted(0, "float32")
    for unit_offset in (False, True):
        norm = Norm(rule("rmsnorm"), unit_offset=unit_offset)
        params = nn.meta.unbox(norm.init(jax.random.key(0), x))
        np.testing.assert_allclose(norm.apply(params, x), reference(x, "rmsnorm"), atol=1e-5)
        assert (params["params"]["scale"] == 1 - unit_offset).all()
