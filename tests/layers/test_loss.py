"""Chunked output projection with cross-entropy: value and gradients of the dense loss, no whole logits in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mstrain.gemm import Grid, Plan, grid_of
from mstrain.layers import kept_loss
from mstrain.layers import loss as chunked
from mstrain.layers.logits import LogitsHead
from mstrain.layers.loss import cross_entropy
from tests.gemm.products import mesh_of
from tests.quick import QUICK

TOKENS, WIDTH, VOCABULARY, PADDED = 96, 16, 57, 64
PLANS = {
    "2x4": ("collective", "2x4", "os"),
    "2x2x2": ("meshslice", "2x2x2", "os"),
    "megatron": ("megatron", "2x4", "rs"),
    "fsdp": ("fsdp", "2x4", "os"),
    "transposed": ("collective", "4x2", "rs"),
}
WHOLE = {"one": ("meshslice", "1x1", "os"), "copies": ("meshslice", "4x1x1", "os")}


def head_on(where, soft_cap=None, vocab_size=VOCABULARY):
    algorithm, mesh, flow = (PLANS | WHOLE)[where]
    return LogitsHead(vocab_size, Plan(algorithm, flow, grid_of(algorithm, mesh_of(mesh))), soft_cap)


def inputs(scale=1.0, dtype="float32"):
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(scale * rng.standard_normal(s), dtype) for s in ((TOKENS, WIDTH), (WIDTH, PADDED)))
    targets = jnp.asarray(rng.integers(0, VOCABULARY, TOKENS), jnp.int32)
    targets = targets.at[0].set(0).at[1].set(VOCABULARY - 1)
    return x, w, targets, jnp.asarray(rng.standard_normal(TOKENS), jnp.float32)


def dense(x, w, targets, soft_cap):
    logits = (x.astype(jnp.float32) @ w.astype(jnp.float32))[:, :VOCABULARY]
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def value_and_slopes(loss, x, w, g):
    value, backward = jax.vjp(loss, x, w)
    return value, *backward(g)


def results(head, x, w, targets, g):
    step = jax.jit(lambda x, w, t, g: value_and_slopes(lambda x, w: cross_entropy(x, w, t, head), x, w, g))
    plan = head.plan
    specs = plan.input_layout.spec, plan.grid.weight_spec, head.per_token, head.per_token
    arrays = [jax.device_put(a, plan.grid.sharding(spec)) for a, spec in zip((x, w, targets, g), specs, strict=True)]
    return step.lower(*arrays).compile(compiler_options=QUICK)(*arrays)


@pytest.mark.parametrize("where, few, soft_cap", [(w, few, 5.0 if few else None) for w in PLANS for few in (0, 7)])
def test_value_and_gradients_equal_the_dense_loss(where, few, soft_cap, monkeypatch):
    """In one chunk and in seven or more, of the vocabulary or of tokens; the last chunk overlaps the one before."""
    if few:
        monkeypatch.setattr(chunked, "WHOLE", 0)
        monkeypatch.setattr(chunked, "FEWEST", few)
    x, w, targets, g = inputs()
    value, dx, dw = results(head_on(where, soft_cap), x, w, targets, g)
    want, want_dx, want_dw = value_and_slopes(lambda x, w: dense(x, w, targets, soft_cap), x, w, g)
    np.testing.assert_allclose(value, want, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-5)
    assert not np.asarray(dw[:, VOCABULARY:]).any()  # padding learns nothing


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("where", ["one", "copies"])
def test_kept_slopes_have_the_value_and_gradients_of_the_dense_loss(where, chunks, soft_cap, monkeypatch):
    monkeypatch.setattr(kept_loss, "keeps_slopes", lambda *of: True)
    x, w, targets, g = inputs()
    head = head_on(where, soft_cap)
    monkeypatch.setattr(kept_loss, "CHUNK", 4 * TOKENS * PADDED // head.plan.grid.mesh.size // chunks)
    value, dx, dw = results(head, x, w, targets, g)
    want, want_dx, want_dw = value_and_slopes(lambda x, w: dense(x, w, targets, soft_cap), x, w, g)
    np.testing.assert_allclose(value, want, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-5)
    assert not np.asarray(dw[:, VOCABULARY:]).any()


def test_slopes_are_kept_on_gpus_whose_logits_are_whole_and_few(monkeypatch):
    x, w, *_ = inputs()
    assert not kept_loss.keeps_slopes(head_on("one"), x, w)
    monkeypatch.setattr(Grid, "platform", property(lambda self: "gpu"))
    assert kept_loss.keeps_slopes(head_on("one"), x, w) and not kept_loss.keeps_slopes(head_on("2x4"), x, w)
    monkeypatch.setattr(kept_loss, "KEPT", 4 * TOKENS * PADDED // 4)
    assert kept_loss.keeps_slopes(head_on("copies"), x, w) and not kept_loss.keeps_slopes(head_on("one"), x, w)


def test_padding_would_count_if_it_were_not_masked():
    x, w, targets, g = inputs()
    value, *_ = results(head_on("2x4", vocab_size=PADDED), x, w, targets, g)
    assert not np.allclose(value, dense(x, w, targets, None), rtol=1e-3)


def test_huge_logits_stay_finite_and_gradients_keep_their_dtype():
    x, w, targets, g = inputs(scale=100, dtype="bfloat16")
    value, dx, dw = results(head_on("2x4"), x, w, targets, g)
    assert value.dtype == jnp.float32 and dx.dtype == dw.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, dense(x, w, targets, None), rtol=1e-4)
    assert np.isfinite(np.asarray(dw, np.float32)).all() and np.isfinite(np.asarray(dx, np.float32)).all()


@pytest.mark.parametrize("where", ["2x4", "fsdp", "megatron"])
@pytest.mark.parametrize("vocab_size", [128256, 256000])
def test_no_device_holds_its_logits(where, vocab_size):
    """The whole float32 logits of a device would take four times what the compiled gradient takes beside arguments."""
    head, tokens = head_on(where, vocab_size=vocab_size), 2048
    grid = head.plan.grid
    specs = head.plan.input_layout.spec, grid.weight_spec, head.per_token
    shapes = ((tokens, WIDTH), jnp.float32), ((WIDTH, vocab_size), jnp.float32), ((tokens,), jnp.int32)
    arrays = [jax.ShapeDtypeStruct(*s, sharding=grid.sharding(p)) for s, p in zip(shapes, specs, strict=True)]
    step = jax.jit(jax.grad(lambda x, w, t: cross_entropy(x, w, t, head).mean(), (0, 1)))
    memory = step.lower(*arrays).compile(compiler_options=QUICK).memory_analysis()
    logits = 4 * tokens * vocab_size / grid.mesh.size
    assert memory.temp_size_in_bytes < logits / 4
