"""Continues a prompt with the trained model, using the forward pass of training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.checks import at_least
from mstrain.data.tokenizers import Tokenizer
from mstrain.models.transformer import Transformer
from mstrain.program.step import apply


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Text sampled from the model after training."""

    prompt: str = "def __init__(self"
    """Prompt that the model continues after the last step."""
    tokens: int = 100
    """Number of tokens to sample. 0 samples nothing."""
    temperature: float = 0.7
    """Sampling temperature. 0 takes the most likely token."""

    def __post_init__(self):
        at_least("sample", self, tokens=0, temperature=0)


def sample(config: SampleConfig, tokenizer: Tokenizer | None, module: Transformer, sequences: int, params, seed: int):
    """The continuation of the prompt as text, or None when no sample is requested or the corpus has no tokenizer.

    `module` runs `sequences` identical sequences at once, the fewest that its mesh allows.
    """
    if not config.tokens or tokenizer is None:
        return None
    prompt = np.asarray(tokenizer.encode(config.prompt), np.int32)[: module.seq - 1]
    if not len(prompt):
        prompt = np.array([tokenizer.eod or 0], np.int32)
    end = min(len(prompt) + config.tokens, module.seq)
    tokens = np.zeros((sequences, module.seq), np.int32)
    tokens[:, : len(prompt)] = prompt
    generate = jax.jit(_generator(module, config.temperature), static_argnums=(2, 3))
    tokens = generate(params, tokens, len(prompt), end, jax.random.key(seed))
    return tokenizer.decode(np.asarray(tokens.addressable_data(0))[0, :end])


def _generator(module: Transformer, temperature: float):
    """Appends tokens one by one. Each step runs the whole sequence, so no cache is needed."""

    def generate(params, tokens_BxT, begin, end, key):
        def append(place, tokens_BxT):
            logits = apply(module, params, tokens_BxT.reshape(-1), method="__call__")
            logits = logits.reshape(*tokens_BxT.shape, -1)[:, place - 1]
            if temperature:
                chosen = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
            else:
                chosen = jnp.argmax(logits, axis=-1)
            return tokens_BxT.at[:, place].set(chosen.astype(jnp.int32))

        tokens = jax.lax.fori_loop(begin, end, append, tokens_BxT)
        return jax.lax.with_sharding_constraint(tokens, module.plan.head.grid.sharding(jax.P()))

    return generate
