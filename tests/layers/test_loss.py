"""Vocabulary-parallel cross-entropy: value and gradient of the dense one, logits that stay in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mstrain.gemm import Layout
from mstrain.layers.loss import LogitsHead, cross_entropy
from tests.gemm.products import QUICK, mesh_of
from tests.gemm.programs import collectives, groups_of, operations

TOKENS, VOCABULARY, PADDED = 16, 57, 64
LAYOUTS = {
    "2x4": Layout(("data", "row"), ("col",)),
    "2x2x2": Layout(("data", "row"), ("col",)),
    "megatron": Layout(("data",), ("row", "col")),
    "fsdp": Layout(("data", "row", "col"), ()),
}


def head_on(where, soft_cap=None, vocab_size=VOCABULARY):
    return LogitsHead(vocab_size, LAYOUTS[where], mesh_of("2x4" if "x" not in where else where), soft_cap)


def inputs(scale=3.0, dtype="float32"):
    rng = np.random.default_rng(3)
    logits = jnp.asarray(scale * rng.standard_normal((TOKENS, PADDED)), dtype)
    targets = jnp.asarray(rng.integers(0, VOCABULARY, TOKENS), jnp.int32)
    targets = targets.at[0].set(0).at[1].set(VOCABULARY - 1)
    return logits, targets, jnp.asarray(rng.standard_normal(TOKENS), jnp.float32)


def dense(logits, targets, soft_cap):
    logits = logits[:, :VOCABULARY].astype(jnp.float32)
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def value_and_slope(loss, logits, g):
    value, backward = jax.vjp(loss, logits)
    return value, backward(g)[0]


def sharded(head, logits, targets, g):
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(head.mesh, spec))
    per_token = jax.P(head.layout.tokens)
    arrays = place(logits, head.layout.spec), place(targets, per_token), place(g, per_token)
    step = jax.jit(lambda x, t, g: value_and_slope(lambda x: cross_entropy(x, t, head), x, g))
    return step.lower(*arrays), arrays


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("where", LAYOUTS)
def test_value_and_gradient_equal_the_dense_loss(where, soft_cap):
    logits, targets, g = inputs()
    lowered, arrays = sharded(head_on(where, soft_cap), logits, targets, g)
    value, slope = lowered.compile(compiler_options=QUICK)(*arrays)
    want, want_slope = value_and_slope(lambda x: dense(x, targets, soft_cap), logits, g)
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope, want_slope, rtol=1e-5, atol=1e-6)
    assert not np.asarray(slope[:, VOCABULARY:]).any()  # padding learns nothing
    assert slope.sharding.is_equivalent_to(arrays[0].sharding, 2)


def test_padding_would_count_if_it_were_not_masked():
    logits, targets, g = inputs()
    lowered, arrays = sharded(head_on("2x4", vocab_size=PADDED), logits, targets, g)
    value, _ = lowered.compile(compiler_options=QUICK)(*arrays)
    assert not np.allclose(value, dense(logits, targets, None), rtol=1e-3)


def test_huge_logits_stay_finite_and_bfloat16_gradients_keep_their_dtype():
    logits, targets, g = inputs(scale=1e4, dtype="bfloat16")
    lowered, arrays = sharded(head_on("2x4"), logits, targets, g)
    value, slope = lowered.compile(compiler_options=QUICK)(*arrays)
    assert value.dtype == jnp.float32 and slope.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, dense(logits, targets, None), rtol=1e-5)
    want = value_and_slope(lambda x: dense(x, targets, None), logits, g)[1]
    np.testing.assert_allclose(slope.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("where", ["2x4", "megatron", "fsdp"])
def test_only_three_numbers_per_token_travel(where):
    head = head_on(where)
    lowered, _ = sharded(head, *inputs())
    ops = collectives(operations(lowered.as_text()))
    rows = TOKENS // np.prod([head.mesh.shape[axis] for axis in head.layout.tokens])
    assert [(op.kind, op.out_shape) for op in ops] == [("all_reduce", (rows,))] * (3 if head.layout.features else 0)
    assert all(op.groups == groups_of(head.mesh, head.layout.features) for op in ops)
    text = lowered.compile(compiler_options=QUICK).as_text()  # and the partitioner adds nothing
    assert not any(f" {kind}(" in text for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"))
