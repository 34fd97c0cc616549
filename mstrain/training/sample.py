"""Continues a prompt after training."""

import dataclasses

import numpy as np

from mstrain.checks import at_least
from mstrain.data.tokenizers import Tokenizer
from mstrain.models.transformer import Transformer
from mstrain.program.inference import Draw
from mstrain.training.generate import Generator, Request


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


def sample(config: SampleConfig, tokenizer: Tokenizer | None, module: Transformer, params, seed: int) -> str | None:
    """The prompt and its continuation as text, or None when no sample is requested or the corpus has no tokenizer.

    A model with learned positions ends where it has no more of them. A mesh with stages samples nothing.
    """
    if not config.tokens or tokenizer is None or module.plan.stages:
        return None
    prompt, tokens = encode_prompt(tokenizer, config.prompt), config.tokens
    if module.model.position == "learned":
        prompt = prompt[: module.model.context]
        tokens = min(tokens, module.model.context - len(prompt) + 1)
    request = Request(tokens, Draw(config.temperature), seed)
    (stream,) = Generator(module, params, tokenizer)([prompt], request)
    return tokenizer.decode(prompt) + stream.text


def encode_prompt(tokenizer: Tokenizer, text: str, special: bool = False) -> np.ndarray:
    """The tokens of a prompt, int32, at least one, after the token that begins documents.

    With `special`, special tokens in the text are themselves, as in a chat.
    """
    ids = tokenizer.encode_spans(text, ())[0] if special else tokenizer.encode(text)
    begin = [tokenizer.bos] if tokenizer.bos is not None and tokenizer.bos not in ids[:1] else []
    ids = np.concatenate([begin, ids]).astype(np.int32)
    return ids if len(ids) else np.array([tokenizer.eod or 0], np.int32)
