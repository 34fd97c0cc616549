"""Text that is continued with kept keys and values: the tokens of transformers, and of our own forward pass."""

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

# Key-value heads that columns share, windows, soft caps, two rotary bases; learned positions.
CASES = {"gemma3": ("1x8", "megatron", "auto"), "gpt2": ("2x2", "meshslice", "rs")}
OURS = ModelConfig(
    layers=2, width=48, heads=12, num_kv_heads=3, head_dim=4, vocab_size=64, position="alibi", window=5, tied=False,
    attention_soft_cap=2.0,
)  # fmt: skip


# The whole table is `python -m tests.models.generation`.
@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations_are_those_of_transformers(name, tmp_path):
    model = generation.model_of(name, tmp_path, new=10)
    assert generation.equal(generation.continued(model, *CASES[name]), model) == [model.most] * 3


def test_every_token_is_the_most_likely_one_of_the_forward_pass():
    """Sharded weights that each layer gathers, heads that cross their groups, ALiBi, a window."""
    mesh = make_mesh(parse_mesh("2x1x4"))
    plan = make_plan(ParallelConfig("collective"), OURS, mesh, mesh.size, 16, shard="parameters")
    module = Transformer(OURS, plan, 16)
    canonical = jax.device_get(jax.tree.map(lambda x: 8 * x, jax.jit(lambda: init_canonical(module, 0))()))
    prompts = [np.arange(length, dtype=np.int32) + 5 for length in (3, 9)]
    stored = jax.jit(lambda x: from_canonical(module, x), out_shardings=parameter_shardings(module))
    generator = Generator(module, stored(canonical), ByteTokenizer())
    found = [stream.ids for stream in generator(prompts, Request(12, Draw(0)))]
    whole = Transformer(OURS, make_plan(ParallelConfig("gspmd"), OURS, make_mesh(parse_mesh("1x1")), 1, 15), 15)
    forward = jax.jit(lambda tokens: whole.apply({"params": canonical}, tokens).argmax(-1))
    for prompt, ids in zip(prompts, found, strict=True):
        tokens = np.concatenate([prompt, ids])[:15].astype(np.int32)
        count = 15 - len(prompt)
        assert forward(tokens)[len(prompt) - 1 : -1].tolist() == ids[:count] and len(set(ids)) > 3
