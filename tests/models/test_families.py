"""Each family of the zoo, shrunken: against an independent reference, causal, and the same on any mesh.

B sequences of T tokens. The reference is NumPy in float64 and shares no code with the package. One function
is compiled per family and mesh; it gives losses and gradients of any weighted sum of them, which serves all
three properties.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mstrain.layers.attention import alibi_slopes
from mstrain.layers.embedding import Embedding
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.parameters import canonical_shapes, from_canonical
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.models.zoo import load_preset

FAMILIES = ("small", "gpt2", "seed_160m", "llama2_70b", "qwen3_0_6b", "gemma2_27b")
B, T, VOCABULARY = 4, 8, 61  # the vocabulary divides over no mesh, so padding is on trial too


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def shrink(name):
    """The choices of a preset in tiny sizes: a window shorter than a sequence, a head width of its own."""
    preset = load_preset(name)
    model = dataclasses.replace(
        preset,
        layers=2,
        width=32,
        heads=8,
        num_kv_heads=4 if preset.num_kv_heads < preset.heads else None,
        head_dim=8 if preset.head_dim * preset.heads != preset.width else None,
        mlp_dim=48,
        vocab_size=VOCABULARY,
        context=12,
        window=3 if preset.window else None,
    )
    soft = dict(attention_soft_cap=1.5, logit_soft_cap=2.0) if preset.logit_soft_cap else {}  # caps that bite
    return dataclasses.replace(model, **soft)


@functools.cache
def weights(name):
    """Canonical parameters, all of them random: a bias of zeros or a scale of ones would hide its absence."""
    draw = np.random.default_rng(7)

    def leaf(path, shape):
        center = 1.0 if path[-1].key.endswith("scale") and not shrink(name).unit_offset_norm else 0.0
        return (center + draw.normal(0, 0.2, shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, canonical_shapes(module(name, "1x1", "gspmd")))


def module(name, mesh, algorithm):
    model, shape = shrink(name), parse_mesh(mesh)
    plan = make_plan(ParallelConfig(algorithm), model, make_mesh(shape), B, T)
    return Transformer(model, plan, seq=T)


@functools.cache
def losses_and_gradients(name, mesh, algorithm):
    """Jitted (canonical, nudge_BTxD, weight_BT) -> losses_BT, gradients of their weighted sum in both."""
    net = module(name, mesh, algorithm)
    tokens, targets = batch()

    def weighted(canonical, nudge, weight):
        def add_nudge(call, args, kwargs, context):
            y = call(*args, **kwargs)
            is_lookup = isinstance(context.module, Embedding) and context.method_name == "__call__"
            return y + nudge if is_lookup else y

        params = from_canonical(net, canonical)
        with nn.intercept_methods(add_nudge):
            losses = net.apply({"params": params}, tokens, targets, method="loss")
        return jnp.sum(losses * weight), losses

    quick = {"xla_backend_optimization_level": 0}  # compiling is nearly all of the time these tests take
    return jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True), compiler_options=quick)


def batch():
    draw = np.random.default_rng(3)
    return draw.integers(0, VOCABULARY, (2, B * T)).astype(np.int32)


def run(name, mesh="1x1", algorithm="gspmd", weight=None):
    """(losses, canonical gradients, gradients at the embedded tokens), as NumPy arrays."""
    nudge = np.zeros((B * T, shrink(name).width), np.float32)
    weight = np.random.default_rng(5).normal(size=B * T) if weight is None else weight
    compute = losses_and_gradients(name, mesh, algorithm)
    grads, losses = compute(weights(name), nudge, weight.astype(np.float32))
    return jax.device_get((losses, *grads))


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_agree_with_an_independent_reference(name):
    losses, *_ = run(name)
    np.testing.assert_allclose(losses, reference_losses(shrink(name), weights(name), *batch()), rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loss_feels_no_later_token_and_no_other_sequence(name):
    """Exactly zero: a masked score has probability zero, not almost zero. And every seen token is felt."""
    model = shrink(name)
    for t in (0, 3, T - 2):
        _, _, slopes = run(name, weight=np.eye(B * T)[T + t])  # of sequence 1
        felt = np.abs(slopes).max(axis=1).reshape(B, T)
        unfelt = felt.copy()
        unfelt[1, : t + 1] = 0
        assert not unfelt.any()
        assert felt[1, : t + 1].all(), f"{model.name}: token {t} does not see all before it"


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_do_not_depend_on_the_mesh(name):
    one_losses, *one = run(name)
    mesh_losses, *mesh = run(name, "2x4", "meshslice")
    np.testing.assert_allclose(mesh_losses, one_losses, rtol=1e-5)

    def same(path, a, b):
        np.testing.assert_allclose(b, a, atol=1e-5 * np.abs(a).max(), err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(same, one, mesh)


def test_alibi_slopes_of_the_twelve_heads_of_seed_160m():
    """Press et al. (2022): the eight slopes of eight heads, then every second one of sixteen."""
    of_eight, of_sixteen = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (8, 16))
    np.testing.assert_allclose(alibi_slopes(12), [*of_eight, *of_sixteen[::2][:4]], rtol=1e-6)


def reference_losses(m, params, tokens, targets):
    """Float64 losses_BT of model `m` with canonical `params`, sequence by sequence, head by head."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    return reference_head(m, params, reference_features(m, params, tokens), targets)


def reference_features(m, params, tokens):
    """Input of the output projection, [B, T, D]."""
    table = params["embedding"]["table"]
    x = table[tokens.reshape(B, T)] * (math.sqrt(m.width) if m.scaled_embedding else 1)
    if m.position == "learned":
        x = x + params["positions"]["table"][:T]
    for i in range(m.layers):
        window = m.window if m.window and i % 2 == 0 else T
        x = reference_block(m, jax.tree.map(lambda a, i=i: a[i], params["blocks_0"]), x, window)
    return norm(m, x, params["final_norm"])


def reference_block(m, p, x, window):
    if m.parallel_block:
        h = norm(m, x, p["norm"])
        return x + attention(m, h, p["attention"], window) + mlp(m, h, p["mlp"])
    for half in ("attention", "mlp"):
        h = norm(m, x, p[f"{half}_norm"])
        y = attention(m, h, p["attention"], window) if half == "attention" else mlp(m, h, p["mlp"])
        x = x + (norm(m, y, p[f"{half}_post_norm"]) if m.post_norm else y)
    return x


def reference_head(m, params, x, targets):
    table = params["embedding"]["table"]
    logits = cap(x @ (table.T if m.tied else params["head"]["kernel"]), m.logit_soft_cap)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(p, targets.reshape(B, T, 1), -1)).reshape(-1)


def norm(m, x, p):
    if m.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_epsilon)
    return y * (p["scale"] + m.unit_offset_norm) + (p["bias"] if m.norm_bias else 0)


def affine(x, p, bias):
    assert ("bias" in p) == bias
    return x @ p["kernel"] + (p["bias"] if bias else 0)


def cap(x, limit):
    return limit * np.tanh(x / limit) if limit else x


def attention(m, x, p, window):
    H, queries, keys = m.head_dim, m.heads, m.num_kv_heads
    qkv = affine(x, p["qkv"], m.bias != "none").reshape(B, T, queries + 2 * keys, H)
    out = np.zeros((B, T, queries, H))
    for n in range(queries):
        kv = n // (queries // keys)
        q, k, v = qkv[:, :, n], qkv[:, :, queries + kv], qkv[:, :, queries + keys + kv]
        if m.qk_norm:
            q, k = ((z / np.sqrt((z**2).mean(-1, keepdims=True) + m.norm_epsilon)) * p[f"{s}_scale"]
                    for z, s in ((q, "q"), (k, "k")))  # fmt: skip
        if m.position == "rotary":
            q, k = rotate(q, m.rotary_base), rotate(k, m.rotary_base)
        for t in range(T):
            seen = np.arange(max(0, t - window + 1), t + 1)
            scores = np.einsum("bh,bsh->bs", q[:, t], k[:, seen]) * (m.attention_scale or 1 / math.sqrt(H))
            scores = cap(scores, m.attention_soft_cap)
            if m.position == "alibi":
                scores = scores - 2.0 ** (-8 * (n + 1) / queries) * (t - seen)
            chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            out[:, t, n] = np.einsum("bs,bsh->bh", chances, v[:, seen])
    return affine(out.reshape(B, T, queries * H), p["out"], m.bias == "all")


def rotate(x_BxTxH, base):
    """Pairs (i, i + H/2) as complex numbers, turned by t * base ** (-2 i / H)."""
    half = x_BxTxH.shape[-1] // 2
    angle = np.arange(T)[:, None] * base ** (-np.arange(half) / half)
    turned = (x_BxTxH[..., :half] + 1j * x_BxTxH[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def mlp(m, x, p):
    h = affine(x, p["up"], m.bias == "all")
    if m.gated:
        gate, up = np.split(h, 2, -1)
        h = activate(m, gate) * up
    else:
        h = activate(m, h)
    return affine(h, p["down"], m.bias == "all")


def activate(m, x):
    if m.activation == "silu":
        return x / (1 + np.exp(-x))
    assert m.activation == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
