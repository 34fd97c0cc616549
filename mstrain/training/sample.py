"""Continues a prompt with the trained model, using the forward pass of training."""

import dataclasses

import jax
import numpy as np

from mstrain.checks import at_least
from mstrain.data.tokenizers import Tokenizer
from mstrain.models.transformer import Transformer
from mstrain.program.inference import sampling_program


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
    program = sampling_program(module, sequences, len(prompt), end, config.temperature)
    inputs = (
        jax.make_array_from_callback(argument.shape, argument.sharding, lambda index, x=x: np.asarray(x)[index])
        for argument, x in zip(program.arguments[1:], (tokens, np.int32(seed)), strict=True)
    )
    tokens = program.compile()(params, *inputs)
    return tokenizer.decode(np.asarray(tokens.addressable_data(0))[0, :end])
