"""Attention of sequences that four devices split equals that of whole sequences, with every mask and position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mstrain.layers.attention import alibi_slopes
from mstrain.layers.attention_blocks import Blocks, Positions
from mstrain.layers.attention_kernels import AttentionConfig, attend
from mstrain.layers.context_attention import attend_parts
from mstrain.layers.sequence_split import SequenceSplit
from mstrain.layers.splash_blocks import SplashBlocks
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.token_order import TokenOrder
from tests.models.test_sharding import scans

B, S, N, H, PARTS = 2, 32, 4, 8, 4
SPLIT = ("context", "row")
WINDOW = jnp.int32(6)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 15 + [3] * 12, [1] * S], jnp.int32)
SINKS = jnp.linspace(-2, 3, N)
CASES = {
    "grouped": (2, AttentionConfig(0.5, soft_cap=1.5), None),
    "window": (1, AttentionConfig(0.5, windowed=True, sinks=True), None),
    "segments": (4, AttentionConfig(0.5, alibi=True), SEGMENTS),
}


@functools.cache
def inputs(keys: int):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal((B, S, heads, H)), jnp.float32) for heads in (N, keys, keys, N)]


def with_gradients(attention, config, q, k, v, dy):
    """(y, dq, dk, dv), and the gradients of sinks at the end where there are some."""
    if not config.sinks:
        y, pullback = jax.vjp(attention, q, k, v)
        return y, *pullback(dy)
    y, pullback = jax.vjp(lambda q, k, v, sinks: attention(q, k, v, sinks_N=sinks), q, k, v, SINKS)
    return y, *pullback(dy)


def split_over_devices(case: str, exchange: str):
    """(y, dq, dk, dv) in the order of the sequence, by four devices."""
    keys, config, segments = CASES[case]
    split = SequenceSplit(SPLIT, PARTS, exchange)
    config = dataclasses.replace(config, split=split)
    mesh, order, slopes = make_mesh(parse_mesh("context2-row2-col1")), TokenOrder(context=2, rows=2), alibi_slopes(N)

    def local(*arrays):
        parts = (x.reshape(B, S // PARTS, *x.shape[1:]) for x in arrays)
        attention = functools.partial(
            attend_parts, config=config, slopes_N=slopes, window=WINDOW, platform="cpu", segments_BxS=segments
        )
        y, dq, dk, dv, *of_sinks = with_gradients(attention, config, *parts)
        return [x.reshape(-1, *x.shape[2:]) for x in (y, dq, dk, dv)], [jax.lax.psum(x, SPLIT) for x in of_sinks]

    def run(*arrays):
        flat = [jax.vmap(order.apply, 2, 1)(x.reshape(B, S, -1)).reshape(B * S, *x.shape[2:]) for x in arrays]
        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(SPLIT), out_specs=(P(SPLIT), P()), check_vma=False)
        found, of_sinks = mapped(*flat)
        return [order.undo(x, S).reshape(B, S, *x.shape[1:]) for x in found] + of_sinks

    return jax.jit(run)(*inputs(keys))


@pytest.mark.parametrize("case, exchange", [("grouped", "ring"), ("window", "gather"), ("segments", "ring")])
def test_parts_attend_as_whole_sequences_do(case, exchange):
    keys, config, segments = CASES[case]
    whole = functools.partial(
        attend, config=config, slopes_N=alibi_slopes(N), window=WINDOW, platform="cpu", segments_BxT=segments
    )
    want = jax.jit(functools.partial(with_gradients, whole, config))(*inputs(keys))
    names = ("y", "dq", "dk", "dv", *["sinks"] * config.sinks)
    for name, a, b in zip(names, split_over_devices(case, exchange), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_block_of_splash_attention_is_that_of_plain_xla():
    """The kernel's backward pass gets the result and sums over more keys than those of the block."""
    rng = np.random.default_rng(4)
    q, dy, y = (jnp.asarray(rng.standard_normal((1, 2, 128, 128)), jnp.float32) for _ in range(3))
    k, v = (jnp.asarray(rng.standard_normal((1, 1, 128, 128)), jnp.float32) for _ in range(2))
    places, ids = jnp.arange(128), jnp.repeat(jnp.arange(2), 64)[None]
    config, extras = AttentionConfig(0.1, soft_cap=5.0), (Positions(None, None, (places, places), (ids, ids)), True)

    @jax.jit
    def both_passes(q, k, v, y, dy):
        _, total = Blocks(config).forward(q, k, v, *extras)
        computed = [Blocks(config), SplashBlocks(config, interpret=True)]
        return [(*b.forward(q, k, v, *extras), *b.backward(q, y, total + 1, dy, k, v, *extras)) for b in computed]

    for want, found in zip(*both_passes(q, k, v, y, dy), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_no_transfer_of_a_ring_waits_for_the_compute_of_its_step():
    """Everything that is sent is what the step before left, and the backward pass keeps no other part's keys."""
    split, mesh = SequenceSplit(("context",), PARTS, "ring"), make_mesh(parse_mesh("context4-row1-col1"))
    config = AttentionConfig(0.5, split=split)

    def local(q, k, v, dy):
        attention = functools.partial(attend_parts, config=config, slopes_N=None, window=None, platform="cpu")
        return with_gradients(attention, config, q, k, v, dy)

    spec = P(None, "context")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = [scan for scan in scans(jax.make_jaxpr(run)(*inputs(2)).jaxpr) if "ppermute" in str(scan)]
    assert len(found) == 2  # of the forward and the backward pass
    for scan, sent in zip(found, (1, 2), strict=True):
        body = scan.params["jaxpr"].jaxpr
        permutes = [eqn for eqn in body.eqns if eqn.primitive.name == "ppermute"]
        assert len(permutes) == sent and all(eqn.invars[0] in body.invars for eqn in permutes)
        # nothing is kept of every step: no result of the scan has one dim more than that of its body
        assert [x.aval.shape for x in scan.outvars] == [x.aval.shape for x in body.outvars]


@pytest.mark.parametrize("order", [TokenOrder(2, 2, 1), TokenOrder(1, 1, 4, 2, 2), TokenOrder(2, 2, 2, 2, 4)], ids=str)
def test_an_order_of_tokens_is_undone(order):
    x = jnp.arange(8 * S).reshape(8, S)
    assert sorted(order.apply(x).tolist()) == [*range(8 * S)] and order.apply(x).tolist() != [*range(8 * S)]
    np.testing.assert_array_equal(order.undo(order.apply(x), S).reshape(8, S), x)


def test_every_part_has_as_many_causal_scores():
    order = TokenOrder(context=PARTS)
    places = np.asarray(order.apply(jnp.arange(S)[None])).reshape(PARTS, -1)
    assert len({int(part.sum()) for part in places}) == 1
