"""Samples: from the distribution that the loss trains, the same in any batch, and ended where they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.data.text_stream import TextStream
from mstrain.data.tokenizers import ByteTokenizer
from mstrain.models.config import ModelConfig
from mstrain.models.plan import canonical_plan
from mstrain.models.transformer import Transformer
from mstrain.program.inference import Draw
from mstrain.training.generate import Generator, Request

SEQ = 32
CAPPED = ModelConfig(layers=1, width=16, heads=2, vocab_size=64, context=SEQ, logit_soft_cap=1e-3)


@pytest.fixture(scope="module")
def made():
    """A module with large weights, so that its raw logits are far apart, and its parameters."""
    module = Transformer(CAPPED, canonical_plan(CAPPED), SEQ)
    params = module.init(jax.random.key(0), jnp.arange(SEQ, dtype=jnp.int32))["params"]
    params = jax.tree.map(lambda x: 50 * x.value, params, is_leaf=lambda x: hasattr(x, "value"))
    return module, params


@pytest.fixture(scope="module")
def generator(made):
    module, params = made
    return Generator(module, params, ByteTokenizer())


def prompts(*lengths):
    return [np.arange(1, length + 1, dtype=np.int32) for length in lengths]


def test_the_logits_of_a_sample_are_those_of_the_loss(made):
    module, params = made
    tokens = jnp.arange(SEQ, dtype=jnp.int32)
    targets = jnp.roll(tokens, 1)
    logits = jax.jit(module.apply)({"params": params}, tokens)
    loss = jax.jit(functools.partial(module.apply, method="loss"))({"params": params}, tokens, targets)
    expected = -jax.nn.log_softmax(logits)[jnp.arange(SEQ), targets]
    assert logits.shape == (SEQ, 64) and float(jnp.abs(logits).max()) <= 1.001e-3
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_soft_cap_flattens_what_is_sampled_and_a_batch_changes_no_sample(made, generator):
    module, params = made
    raw_logits = jax.jit(functools.partial(module.apply, method="raw_logits"))
    uncapped = raw_logits({"params": params}, jnp.arange(SEQ, dtype=jnp.int32))
    assert float(jnp.ptp(uncapped)) > 10  # without the cap one token has it all
    request = Request(28, Draw(1.0), seed=3)
    both = [stream.ids for stream in generator(prompts(1, 4), request)]
    assert all(len(set(ids)) > 14 for ids in both) and both[0] != both[1]
    assert [generator([prompt], request, first=i)[0].ids for i, prompt in enumerate(prompts(1, 4))] == both
    # Nearly equal logits: what is drawn follows from seed, row and position, whatever was drawn before.
    (longer,) = generator(prompts(4), request)
    assert longer.ids[:25] == both[0][3:]


def test_learned_positions_end(generator):
    assert len(generator(prompts(4), Request(29, Draw(1.0)))[0].ids) == 29  # positions 0 to 31
    with pytest.raises(ValueError, match=r"4 tokens and tokens=30 .* has 32 learned ones. Type tokens=29 or less"):
        generator(prompts(4), Request(30))


@pytest.mark.parametrize("draw, possible", [
    (Draw(0), {3}), (Draw(0.01), {3}), (Draw(1, top_k=1), {3}), (Draw(1, top_k=2), {2, 3}),
    (Draw(1, top_p=0.6), {3}), (Draw(1, top_p=0.7), {2, 3}), (Draw(1, 3, 0.99), {1, 2, 3}), (Draw(1), {0, 1, 2, 3}),
])  # fmt: skip
def test_which_tokens_may_be_drawn(draw, possible):
    logits = jnp.log(jnp.array([[0.04, 0.08, 0.24, 0.64]]))
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = draw(jnp.tile(logits, (400, 1)), keys)
    assert set(np.asarray(drawn).tolist()) == possible
    if draw == Draw(1):
        np.testing.assert_allclose(np.bincount(drawn) / 400, jnp.exp(logits[0]), atol=0.08)


@pytest.mark.parametrize("stop, text, end", [
    ((), "né 日本!", "eos"), (("日",), "né ", "stop"), (("!!", "本"), "né 日", "stop"), (("!x",), "né 日本!", "eos"),
])  # fmt: skip
def test_text_appears_in_whole_characters_and_without_what_stops_it(stop, text, end):
    stream, pieces = TextStream(ByteTokenizer(), np.array([104, 105]), stop), []
    for token in [*"né 日本!".encode(), 255]:
        if stream.end is None:
            pieces.append(stream.add(token))
    assert "".join(pieces) == stream.text == text and stream.end == end
    assert "\ufffd" not in text and ("!" not in pieces[:-1] if stop == ("!x",) else True)


def test_wrong_requests_name_the_fix():
    with pytest.raises(ValueError, match="Type top_p=1"):
        Draw(1, top_p=0)
    with pytest.raises(ValueError, match="Type tokens=1"):
        Request(0)
