"""Attention against a loop over tokens, and the properties of its position schemes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mstrain.gemm import Heads, Plan, PlanPair, Span, grid_of
from mstrain.layers import splash
from mstrain.layers.attention import Attention, QkNorm, alibi_slopes, segment_positions
from mstrain.layers.attention_kernels import AttentionConfig, attend, attend_by_splash
from mstrain.layers.dense import Inits
from mstrain.layers.rotary import GLOBAL, Rotary
from tests.gemm.products import mesh_of
from tests.layers.random_parameters import random_parameters
from tests.quick import QUICK

B, T, N, K, H = 2, 8, 6, 2, 4
attended = jax.jit(attend, static_argnames="config", compiler_options=QUICK)


def random_qkv(dtype="float32"):
    rng = np.random.default_rng(5)
    return [jnp.asarray(rng.standard_normal((B, T, heads, H)), dtype) for heads in (N, K, K)]


def naive(q, k, v, scores, slopes, window, sinks=None):
    """One query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y = np.zeros_like(q)
    for b, t, n in np.ndindex(B, T, N):
        first = max(0, t - window + 1) if scores.windowed else 0
        keys = range(first, t + 1)
        s = np.array([q[b, t, n] @ k[b, u, n // (N // K)] for u in keys]) * scores.scale
        if scores.soft_cap:
            s = scores.soft_cap * np.tanh(s / scores.soft_cap)
        if scores.alibi:
            s = s + slopes[n] * np.array([u - t for u in keys])
        p = np.exp(s - s.max())
        rest = np.exp(sinks[n] - s.max()) if scores.sinks else 0.0
        y[b, t, n] = sum(w * v[b, u, n // (N // K)] for w, u in zip(p / (p.sum() + rest), keys, strict=True))
    return y


@pytest.mark.parametrize(
    "scores, window",
    [
        (AttentionConfig(0.5), T),
        (AttentionConfig(0.5, alibi=True), T),
        (AttentionConfig(2.0, soft_cap=1.5), T),
        (AttentionConfig(0.5, windowed=True), 3),
        (AttentionConfig(0.5, windowed=True), T),
        (AttentionConfig(0.5, sinks=True), T),
        (AttentionConfig(2.0, alibi=True, soft_cap=1.5, windowed=True, sinks=True), 3),
    ],
    ids=("plain", "alibi", "soft_cap", "window", "whole_window", "sinks", "all"),
)
def test_grouped_query_attention_equals_a_loop_over_tokens(scores, window):
    q, k, v = random_qkv()
    slopes, sinks = alibi_slopes(N), jnp.linspace(-2, 3, N)
    y = attended(q, k, v, scores, slopes, jnp.int32(window), sinks_N=sinks if scores.sinks else None)
    want = naive(q, k, v, scores, np.asarray(slopes), window, np.asarray(sinks))
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    other = naive(q, k, v, dataclasses.replace(scores, scale=scores.scale * 2), np.asarray(slopes), window, sinks)
    assert not np.allclose(y, other, atol=1e-2)


def test_bfloat16_attention_keeps_its_dtype_and_float32_scores():
    q, k, v = random_qkv("bfloat16")
    y = attend(q, k, v, AttentionConfig(0.5), None, jnp.int32(T))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), naive(q, k, v, AttentionConfig(0.5), None, T), atol=2e-2)


@pytest.mark.parametrize("windowed", [False, True])
def test_no_token_sees_the_future_or_beyond_its_window(windowed):
    """By gradients: dy_t / dv_u is zero exactly where u is unseen."""
    q, k, v = random_qkv()
    scores, window = AttentionConfig(0.5, windowed=windowed), 3

    @jax.jit
    def slope(t, v):
        return jax.grad(lambda v: attend(q, k, v, scores, None, jnp.int32(window))[:, t].sum())(v)

    def seen(t):
        return np.abs(slope(t, v)).sum((0, 2, 3)) > 0

    for t in (0, 2, T - 1):
        first = t - window + 1 if windowed else 0
        assert [bool(x) for x in seen(t)] == [first <= u <= t for u in range(T)]


def test_segments_attend_and_count_positions_as_if_alone():
    q, k, v = random_qkv()
    segments = jnp.asarray([[1] * 3 + [2] * 5, [1] * T], jnp.int32)
    positions = segment_positions(segments)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0, 1, 2, 3, 4], range(T)])
    scores = AttentionConfig(0.5, windowed=True)
    turned = [Rotary(100.0).rotate(x, GLOBAL, positions) for x in (q, k)]
    y = attend(*turned, v, scores, None, jnp.int32(4), "cpu", segments)
    for row, part in ((0, slice(0, 3)), (0, slice(3, 8)), (1, slice(0, T))):
        q1, k1, v1 = (x[row : row + 1, part] for x in (q, k, v))
        q1, k1 = (Rotary(100.0).rotate(x, GLOBAL, jnp.arange(q1.shape[1])) for x in (q1, k1))
        want = attended(q1, k1, v1, scores, None, jnp.int32(4))
        np.testing.assert_allclose(y[row : row + 1, part], want, rtol=1e-5, atol=1e-6)


def test_alibi_slopes_are_those_of_the_paper():
    """Press et al., 2022: 8 heads start at 1/2 and halve; others borrow from twice their power of two."""
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    twelve = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]
    np.testing.assert_allclose(alibi_slopes(12), twelve, rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])
    for heads in (3, 5, 6, 20, 71):
        slopes = np.asarray(alibi_slopes(heads))
        assert len(slopes) == len(set(slopes.tolist())) == heads and (slopes > 0).all() and (slopes < 1).all()


def test_rotary_scores_depend_on_distance_alone():
    rng = np.random.default_rng(6)
    q, k = (jnp.broadcast_to(jnp.asarray(rng.standard_normal(8), jnp.float32), (1, 12, 1, 8)) for _ in range(2))
    q, k = (Rotary(100.0).rotate(x, GLOBAL, jnp.arange(12)) for x in (q, k))
    scores = np.asarray(jnp.einsum("btnh,bunh->tu", q, k))
    for distance in range(-11, 12):
        np.testing.assert_allclose(np.ptp(np.diagonal(scores, distance)), 0, atol=1e-4)
    assert np.ptp(scores[0]) > 0.1
    np.testing.assert_allclose(jnp.linalg.norm(q[0, :, 0], axis=-1), jnp.linalg.norm(q[0, 0, 0]), rtol=1e-5)


def test_rotary_turns_pair_i_by_position_times_its_frequency():
    x = jnp.zeros((1, 5, 1, 4)).at[..., 1].set(1.0)  # the second pair is (1, 3)
    angle = np.arange(5) * 100.0 ** (-2 / 4)
    turned = np.asarray(Rotary(100.0).rotate(x, GLOBAL, jnp.arange(5)))[0, :, 0]
    np.testing.assert_allclose(turned, np.stack([0 * angle, np.cos(angle), 0 * angle, np.sin(angle)], 1), atol=1e-6)


SEQUENCES, WIDTH = 8, 24
VARIANTS = {
    "alibi": {"config": AttentionConfig(0.5, alibi=True)},
    "rotary": {"config": AttentionConfig(0.5), "rotary": Rotary(100.0), "qk_norm": QkNorm(1e-5, whole=True)},
}


def attention_step(variant, algorithm, mesh, dataflow="os", slices=1):
    """(y, dx, canonical parameter gradients) of an attention half from canonical parameters."""
    grid = grid_of(algorithm, mesh_of(mesh))
    out = ("rs", grid.swapped) if dataflow == "rs" else ("ls", grid)
    pair = PlanPair(Plan(algorithm, dataflow, grid, slices), Plan(algorithm, *out, slices))
    inits = Inits(nn.initializers.zeros, nn.initializers.zeros)
    module = Attention(
        pair, Span(WIDTH), Heads(8, 4, H, pair.grid.num_cols), bias=(True, True), inits=inits, **VARIANTS[variant]
    )
    rng = np.random.default_rng(7)
    x, g = (
        jax.device_put(rng.standard_normal((SEQUENCES * T, WIDTH), np.float32), grid.sharding(pair.residual.spec))
        for _ in range(2)
    )
    rules, _, params = random_parameters(lambda key: module.init(key, x, T, jnp.int32(T)), grid.mesh, 0.3)

    def program(params, x, g):
        y, backward = jax.vjp(lambda p, x: module.apply({"params": p}, x, T, jnp.int32(T)), params, x)
        return y, *backward(g)

    y, slopes, dx = jax.jit(program).lower(params, x, g).compile(compiler_options=QUICK)(params, x, g)
    return y, dx, jax.tree.map(lambda rule, slope: rule.to_canonical(slope), rules, slopes)


@functools.cache
def on_one_device(variant):
    return attention_step(variant, "collective", "1x1")


@pytest.mark.parametrize(
    "variant, mesh, dataflow, slices",
    [("alibi", "2x4", "os", 3), ("rotary", "2x4", "rs", 2), ("rotary", "2x2x2", "os", 3)],
)
def test_sharded_attention_equals_one_device(variant, mesh, dataflow, slices):
    """Every device finds its own heads, slopes and whole sequences, in fused and sliced weight layouts."""
    one = on_one_device(variant)
    many = attention_step(variant, "meshslice", mesh, dataflow, slices)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_layer_with_a_base_of_its_own_has_no_factor_of_yarn():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 3, 6)), jnp.float32)
    scaled = Rotary(100.0, scaling="yarn:4:32:1:8:1.5", local_base=10.0)
    turned = scaled.rotate(x, jnp.int32(4), jnp.arange(8))
    np.testing.assert_allclose(turned, Rotary(10.0).rotate(x, GLOBAL, jnp.arange(8)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "rotary, window, positions",
    [
        (Rotary(100.0), GLOBAL, np.arange(8)),
        (Rotary(100.0, fraction=0.5, scaling="linear:4"), GLOBAL, np.arange(8)),
        (Rotary(100.0, local_base=10.0), 4, np.arange(16).reshape(2, 8) % 5),
    ],
)
def test_heads_are_rotated_by_a_product_as_by_cuts_and_joins(rotary, window, positions):
    x, dy = (jax.random.normal(jax.random.key(i), (2, 8, 3, 16)).astype(jnp.bfloat16) for i in range(2))

    def by_product(x):
        return rotary.rotate_heads(x.swapaxes(1, 2), jnp.int32(window), jnp.asarray(positions)).swapaxes(1, 2)

    want, back = jax.vjp(lambda x: rotary.rotate(x, jnp.int32(window), jnp.asarray(positions)), x)
    found, product_back = jax.vjp(by_product, x)
    for a, b in ((found, want), (*product_back(dy), *back(dy))):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7, atol=2**-7)


def test_splash_attention_rotates_heads_of_whole_tiles_itself(monkeypatch):
    monkeypatch.setattr(splash, "splash_kernel", functools.partial(splash.splash_kernel, interpret=True))
    config, rotary, positions = AttentionConfig(0.1), Rotary(100.0), jnp.arange(128)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 128, 2, 128)).astype(jnp.bfloat16) for i in range(3))
    turn = functools.partial(rotary.rotate_heads, window=GLOBAL, positions=positions)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(q, k, v):
        found = attend_by_splash(q, k, v, config, GLOBAL, rotate=turn)
        turned = (rotary.rotate(x, GLOBAL, positions) for x in (q, k))
        return found, attend(*turned, v, config, None, GLOBAL)

    found, want = (x.astype(jnp.float32) for x in both(q, k, v))
    np.testing.assert_allclose(found, want, atol=0.02)


def test_splash_attention_has_windows_and_sinks_as_plain_attention_has(monkeypatch):
    """The kernel interpreted on a CPU, with its gradients; the window is traced."""
    monkeypatch.setattr(splash, "splash_kernel", functools.partial(splash.splash_kernel, interpret=True))
    rng, config = np.random.default_rng(5), AttentionConfig(0.25, windowed=True, local=40, sinks=True)
    q, k, v, dy = (jnp.asarray(rng.standard_normal((1, 128, heads, 16)), jnp.bfloat16) for heads in (4, 2, 2, 4))

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def slopes(platform, window, q, k, v, sinks):
        def of(q, k, v, sinks):
            y = attend(q, k, v, config, None, window, platform, sinks_N=sinks)
            return jnp.sum((y * dy).astype(jnp.float32))

        return jax.value_and_grad(of, (0, 1, 2, 3))(q, k, v, sinks)

    for window in (40, GLOBAL):
        found, want = (slopes(at, window, q, k, v, jnp.linspace(-2, 3, 4)) for at in ("tpu", "cpu"))
        assert jnp.min(jnp.abs(want[1][3])) > 0
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            np.testing.assert_allclose(x, y, atol=0.03 * float(jnp.max(jnp.abs(y))))
