"""What a GPU computes in another way has the same numbers: on CPU devices that say they are GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.data import Batch
from mstrain.layers import kept_loss
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import init_parameters
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.step import mean_loss
from tests.models.as_gpu import as_gpu
from tests.quick import QUICK

GPT = ModelConfig(layers=3, width=32, heads=4, vocab_size=60, context=16)
LLAMA = dataclasses.replace(
    GPT, num_kv_heads=2, mlp_dim=64, norm="rmsnorm", norm_bias=False, position="rotary", activation="silu", gated=True,
    bias="none", tied=False,
)  # fmt: skip


def losses_and_slopes(model, mesh, remat="none"):
    """(lowered program, loss, gradients) of two sequences with random parameters."""
    mesh = make_mesh(parse_mesh(mesh))
    module = Transformer(model, make_plan(ParallelConfig(), model, mesh, 2, 16), 16, remat=remat)
    params = jax.tree.map(lambda x: x + 0.02 * jnp.sin(jnp.arange(x.size).reshape(x.shape)), init_parameters(module, 0))
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, model.known_vocab_size)
    step = jax.jit(jax.value_and_grad(lambda params: mean_loss(module, params, Batch(tokens)))).lower(params)
    return step.as_text(), *step.compile(compiler_options=QUICK)(params)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(("model", "mesh"), [(GPT, "1x1"), (LLAMA, "1x1"), (GPT, "2x1x2")], ids=["gpt", "llama", "2x2"])
def test_loss_and_gradients_are_those_of_other_platforms(model, mesh, remat, monkeypatch):
    _, loss, slopes = losses_and_slopes(model, mesh, remat)
    as_gpu(monkeypatch)
    _, here, found = losses_and_slopes(model, mesh, remat)
    np.testing.assert_allclose(here, loss, rtol=1e-6)
    for path, want in jax.tree_util.tree_leaves_with_path(slopes):
        got = found
        for key in path:
            got = got[key.key]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_layers_are_no_loop_and_logits_are_computed_once(monkeypatch):
    loop, *_ = losses_and_slopes(GPT, "1x1")
    as_gpu(monkeypatch)
    straight, *_ = losses_and_slopes(GPT, "1x1")
    assert "stablehlo.while" in loop and "stablehlo.while" not in straight

    def products(text):
        """Those with as many results as there are logits, of 32 tokens and features: of the table's gradient, too."""
        return sum("dot_general" in line and "-> tensor<32x60xf32>" in line for line in text.splitlines())

    assert (products(loop), products(straight)) == (3, 2)


def test_slopes_too_large_to_keep_are_computed_again(monkeypatch):
    as_gpu(monkeypatch)
    monkeypatch.setattr(kept_loss, "KEPT", 0)
    text, *_ = losses_and_slopes(GPT, "1x1")
    assert "stablehlo.while" in text
