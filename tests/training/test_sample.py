"""A sample is drawn from the distribution that the loss trains."""

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.models.config import ModelConfig
from mstrain.models.plan import canonical_plan
from mstrain.models.transformer import Transformer
from mstrain.program.inference import sampling_program

SEQ = 32
CAPPED = ModelConfig(layers=1, width=16, heads=2, vocab_size=64, context=SEQ, logit_soft_cap=1e-3)


def made(model=CAPPED):
    """A module with large weights, so that its raw logits are far apart."""
    module = Transformer(model, canonical_plan(model), SEQ)
    tokens = jnp.arange(SEQ, dtype=jnp.int32)
    params = module.init(jax.random.key(0), tokens)["params"]
    return module, jax.tree.map(lambda x: 50 * x, params), tokens


def test_the_logits_of_a_sample_are_those_of_the_loss():
    module, params, tokens = made()
    targets = jnp.roll(tokens, 1)
    logits = module.apply({"params": params}, tokens)
    loss = module.apply({"params": params}, tokens, targets, method="loss")
    expected = -jax.nn.log_softmax(logits)[jnp.arange(SEQ), targets]
    assert logits.shape == (SEQ, 64) and float(jnp.abs(logits).max()) <= 1.001e-3
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_soft_cap_flattens_what_is_sampled():
    module, params, tokens = made()
    uncapped = module.apply({"params": params}, tokens, method="raw_logits")
    assert float(jnp.ptp(uncapped)) > 10  # without the cap one token has it all
    generate = sampling_program(module, 1, 1, SEQ, temperature=1.0).function
    drawn = jax.jit(generate)(params, jnp.zeros((1, SEQ), jnp.int32), 0)
    assert len(np.unique(drawn)) > SEQ / 2
