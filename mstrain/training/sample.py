"""Continues a prompt with the trained model, by the forward pass and the logits of the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.checks import at_least
from mstrain.data.tokenizers import Tokenizer
from mstrain.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """A sample at the end of training."""

    prompt: str = "def __init__(self"
    """Text that the trained model continues at the end."""
    tokens: int = 100
    """Tokens to sample; 0 for none."""
    temperature: float = 0.7
    """Sampling temperature; 0 takes the most likely token."""

    def __post_init__(self):
        at_least("sample", self, tokens=0, temperature=0)


def sample(config: SampleConfig, tokenizer: Tokenizer | None, module: Transformer, sequences: int, params, seed: int):
    """The continuation of the prompt as text, or None when none is wanted or tokens stand for no text.

    `module` runs `sequences` equal sequences at once, as few as its mesh allows.
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
    """Appends tokens one by one; each step runs the whole sequence: no cache and no second model needed."""

    def generate(params, tokens_BxT, begin, end, key):
        def append(place, tokens_BxT):
            logits = module.apply({"params": params}, tokens_BxT.reshape(-1), method="logits")
            logits = logits.reshape(*tokens_BxT.shape, -1)[:, place - 1]
            if temperature:
                chosen = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
            else:
                chosen = jnp.argmax(logits, axis=-1)
            return tokens_BxT.at[:, place].set(chosen.astype(jnp.int32))

        tokens = jax.lax.fori_loop(begin, end, append, tokens_BxT)
        return jax.lax.with_sharding_constraint(tokens, module.plan.head.grid.sharding(jax.P()))

    return generate
