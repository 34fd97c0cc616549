"""The FLOP count against the matrix products that JAX is asked for, and against published formulas."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from mstrain.models.config import ModelConfig
from mstrain.models.flops import (
    flops_formula,
    forward_flops_per_token,
    matmul_parameters,
    training_flops_per_token,
)
from mstrain.models.parameters import canonical_model_shapes
from mstrain.models.plan import canonical_plan
from mstrain.models.size import count_parameters
from mstrain.models.transformer import Transformer
from mstrain.models.zoo import load_preset

SEQ, SEQUENCES = 16, 2
FAMILIES = ("gpt2", "seed_160m", "llama2_70b", "qwen3_0_6b", "gemma2_27b", "further tokens")


def shrink(name):
    """The choices of a preset in sizes of which no two are equal."""
    further = name == "further tokens"
    preset = load_preset("llama2_70b" if further else name)
    grouped = preset.num_kv_heads < preset.heads
    heads = dict(heads=4, num_kv_heads=2 if grouped else None, head_dim=6)
    sizes = dict(layers=3, width=40, mlp_dim=56, vocab_size=97, context=64)
    return dataclasses.replace(preset, **heads, **sizes, window=None, mtp_layers=2 * further)


def dot_flops(jaxpr):
    """Multiply-adds, as two each, of all dot products in a jaxpr, loops unrolled."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[dim] for dim in contracted]
            total += 2 * math.prod(sizes) * eqn.outvars[0].aval.size
        elif eqn.primitive.name == "cond":
            total += max(dot_flops(branch.jaxpr) for branch in eqn.params["branches"])
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            inner = [getattr(param, "jaxpr", param) for param in jax.tree.leaves(list(eqn.params.values()))]
            total += times * sum(dot_flops(jaxpr) for jaxpr in inner if hasattr(jaxpr, "eqns"))
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_count_is_the_products_of_the_traced_model(name):
    """Forward and backward, to the last FLOP; the plain kernel computes the full square of scores."""
    model = shrink(name)
    module = Transformer(model, canonical_plan(model), seq=SEQ)
    tokens = jax.ShapeDtypeStruct((SEQ * SEQUENCES,), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), tokens)

    def loss(variables, tokens):
        return module.apply(variables, tokens, tokens, method="losses").sum()

    forward = jax.make_jaxpr(loss)(variables, tokens)
    both = jax.make_jaxpr(jax.grad(loss))(variables, tokens)
    assert dot_flops(forward.jaxpr) == forward_flops_per_token(model, SEQ) * tokens.size
    again = 2 * model.width * model.known_vocab_size  # logits are computed again instead of kept
    again *= 1 + model.mtp_layers
    assert dot_flops(both.jaxpr) == (training_flops_per_token(model, SEQ) + again) * tokens.size


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "gpt_oss_20b"])
def test_a_token_multiplies_every_kernel_but_those_of_experts_that_it_does_not_choose(name):
    m, total = load_preset(name), 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(canonical_model_shapes(m)):
        names = [key.key for key in path]
        if names[-1] in ("kernel", "router"):
            of_experts = names[:2] == ["blocks_0", "mlp"] and names[-1] == "kernel"
            total += leaf.size * (m.experts_per_token / m.experts if of_experts else 1)
    assert matmul_parameters(m) == total
    of_value = m.latent.value_dim if m.latent.key_rank else m.head_dim
    scores = forward_flops_per_token(dataclasses.replace(m, window=None), 64) - 2 * total
    assert scores == 2 * m.layers * m.heads * (m.head_dim + of_value) * 64


def test_conventions_by_their_formulas():
    """PaLM paper, appendix B: 6 N + 12 L H Q T; causal is half of the second term."""
    m = load_preset("gpt3_175b")
    square = 12 * m.layers * m.heads * m.head_dim * m.context
    products = 6 * matmul_parameters(m)
    assert training_flops_per_token(m, m.context, "full") == products + square
    assert training_flops_per_token(m, m.context, "causal") == products + square / 2
    assert training_flops_per_token(m, m.context) == 3 * forward_flops_per_token(m, m.context)


def test_gpt3_total_compute_as_published():
    """Brown et al., table D.1: 3.14e23 FLOPs for 300 billion tokens, which counts no attention."""
    m = load_preset("gpt3_175b")
    assert 6 * matmul_parameters(m) * 300e9 == pytest.approx(3.14e23, rel=5e-3)


@pytest.mark.parametrize("name, inside", [("gpt2", True), ("llama3_8b", False)])
def test_lookup_is_no_product_and_output_projection_is(name, inside):
    """Everything but norms, biases and tables multiplies; a tied table does, as output projection."""
    m = load_preset(name)
    table = m.vocab_size * m.width
    rest = count_parameters(m) - matmul_parameters(m) - (0 if inside else table)
    tiny = m.layers * 13 * m.width + 2 * m.width + m.context * m.width
    assert 0 < rest <= tiny


def test_window_counts_the_band_that_is_seen():
    """Pairs counted one by one; the diagonal is the only difference."""
    model = ModelConfig(layers=3, window=100, vocab_size=256)  # layers 0 and 2 have the window
    seq = 1000
    pairs = 2 * sum(min(t + 1, 100) for t in range(seq)) + sum(t + 1 for t in range(seq))
    without_scores = 2 * matmul_parameters(model)
    scores = forward_flops_per_token(model, seq, "causal") - without_scores
    per_pair = 4 * model.heads * model.head_dim
    assert scores * seq == pytest.approx(pairs * per_pair, rel=3 * seq / pairs)
    wide, none = (dataclasses.replace(model, window=window) for window in (seq, None))
    assert forward_flops_per_token(wide, seq) == forward_flops_per_token(none, seq)


@pytest.mark.parametrize("window, further", [(None, 0), (100, 0), (1000, 0), (None, 2)])
def test_the_formula_in_words_gives_the_count(window, further):
    model, seq = ModelConfig(layers=3, window=window, vocab_size=256, mtp_layers=further), 1000
    words = {
        "mtp_layers": further,
        "multiplying parameters": matmul_parameters(model), "head_dim": model.head_dim, "heads": model.heads,
        "3 layers": 3, "2 layers": 2, "1 layers": 1, "layers": 3, "seq": seq, "window": window, " x ": "*",
    }  # fmt: skip
    formula = flops_formula(model, seq)
    for word, value in words.items():
        formula = formula.replace(word, str(value))
    assert eval(formula) == training_flops_per_token(model, seq)


def test_errors_name_the_fix():
    with pytest.raises(ValueError, match="Choose full or causal"):
        forward_flops_per_token(load_preset("gpt2"), 1024, "half")
    with pytest.raises(ValueError, match="Set model.vocab_size"):
        training_flops_per_token(load_preset("small"), 512)
