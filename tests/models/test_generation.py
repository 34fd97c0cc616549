"""Text that is continued with kept keys and values: the tokens of transformers, and of our own forward pass."""

import functools

import jax
import numpy as np
import pytest

from mstrain.data.tokenizers import ByteTokenizer
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import from_canonical, init_canonical, parameter_shardings
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.inference import Draw
from mstrain.training.generate import Generator, Request
from tests.models import generation

# Key-value heads that columns share, windows, soft caps, two rotary bases; learned positions; latents, dense layers.
CASES = {
    "gemma3": ("1x8", "megatron", "auto"),
    "gpt2": ("2x2", "meshslice", "rs"),
    "deepseek_v2": ("2x2", "meshslice", "rs"),
}
OURS = ModelConfig(
    layers=2, width=48, heads=12, num_kv_heads=3, head_dim=4, vocab_size=64, position="alibi", window=5, tied=False,
    attention_soft_cap=2.0,
)  # fmt: skip


# The whole table is `python -m tests.models.generation`.
@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations_are_those_of_transformers(name, tmp_path):
    model = generation.model_of(name, tmp_path, new=10)
    assert generation.equal(generation.continued(model, *CASES[name]), model) == [model.most] * 3


# Sharded weights that each layer gathers; split sequences, and rows over which the prompts do not divide.
PLANS = [("2x1x4", "collective", "parameters"), ("context2-row3-col2", "meshslice", "none")]


def test_every_token_is_the_most_likely_one_of_the_forward_pass():
    """Heads that cross their groups, ALiBi, a window."""
    one = make_mesh(parse_mesh("1x1"))
    whole = Transformer(OURS, make_plan(ParallelConfig("gspmd"), OURS, one, 1, 15), 15)
    canonical = jax.device_get(jax.tree.map(lambda x: 8 * x, jax.jit(lambda: init_canonical(whole, 0))()))
    forward = jax.jit(lambda tokens: whole.apply({"params": canonical}, tokens).argmax(-1))
    prompts = [np.arange(length, dtype=np.int32) + 5 for length in (3, 9)]
    for shape, algorithm, shard in PLANS:
        mesh = make_mesh(parse_mesh(shape))
        module = Transformer(OURS, make_plan(ParallelConfig(algorithm), OURS, mesh, mesh.size, 16, shard=shard), 16)
        stored = jax.jit(functools.partial(from_canonical, module), out_shardings=parameter_shardings(module))
        generator = Generator(module, stored(canonical), ByteTokenizer())
        for prompt, stream in zip(prompts, generator(prompts, Request(12, Draw(0))), strict=True):
            tokens = np.concatenate([prompt, stream.ids])[:15].astype(np.int32)
            count = 15 - len(prompt)
            assert forward(tokens)[len(prompt) - 1 : -1].tolist() == stream.ids[:count], shape
            assert len(set(stream.ids)) > 3
