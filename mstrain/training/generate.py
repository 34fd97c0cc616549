"""Continues a batch of prompts with the programs prefill and decode, on the mesh of the model."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.checks import at_least
from mstrain.data.text_stream import TextStream
from mstrain.data.tokenizers import Tokenizer
from mstrain.models.config import ModelConfig
from mstrain.models.decoding import decoding_module
from mstrain.models.parameters import gather_parameters
from mstrain.models.transformer import Transformer
from mstrain.program.inference import Draw, decode_program, prefill_program
from mstrain.program.program import Program

SLOTS = 128  # slots and padded prompts are multiples of it: other prompts use the same compiled programs


@dataclasses.dataclass(frozen=True)
class Request:
    """How prompts are continued.

    Attributes:
      tokens: most new tokens of each.
      draw: how a token is chosen.
      seed: of the tokens; prompt number i draws the same ones in any batch and on any mesh, up to rounding.
      stop: texts that end a continuation and are not part of it.
    """

    tokens: int
    draw: Draw = Draw()
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        at_least("", self, tokens=1, seed=0)
        if "" in self.stop:
            raise ValueError("stop= has an empty text. Type texts to stop at, such as stop='[\"\\n\\n\"]'.")


@dataclasses.dataclass
class Speed:
    """Tokens of all prompts and of all continuations, and seconds of both parts; the first new token belongs to
    prefill."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    compile_seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"prefill {self.prompt_tokens:,} tokens, {self.prompt_tokens / self.prefill_seconds:,.0f} tokens/s"]
        if self.decode_steps:
            step = f"{1000 * self.decode_seconds / self.decode_steps:,.1f} ms/step"
            rate = f"{self.new_tokens / self.decode_seconds:,.0f} tokens/s"
            parts.append(f"decode {self.new_tokens:,} tokens, {rate}, {step}")
        return "; ".join([*parts, f"compiling took {self.compile_seconds:.1f} s"])


def check_positions(model: ModelConfig, prompt: int, tokens: int) -> None:
    """Raises ValueError for a prompt and continuation of more tokens than the model has positions for."""
    if model.position != "learned" or prompt + tokens - 1 <= model.context:
        return
    left = model.context - prompt + 1
    fix = f"Type tokens={left} or less" if left > 0 else f"Give a prompt of less than {model.context} tokens"
    raise ValueError(
        f"A prompt of {prompt} tokens and tokens={tokens} more need {prompt + tokens - 1} positions, and model "
        f"{model.name} has {model.context} learned ones. {fix}."
    )


class Generator:
    """Continues prompts with one model. Programs are compiled for the shapes that prompts need, and kept."""

    def __init__(self, module: Transformer, params: Any, tokenizer: Tokenizer):
        self._module, self._params = _gathered(decoding_module(module), params)
        self._tokenizer = tokenizer
        self._compiled: dict[tuple, Any] = {}
        self.speed = Speed()

    def __call__(
        self, prompts: list[np.ndarray], request: Request, show: Callable[[int, str], Any] | None = None, first: int = 0
    ) -> list[TextStream]:
        """The continuations of `prompts` (token ids, at least one each).

        Args:
          show: called with the number of a prompt and new text of it as soon as there is some.
          first: number of the first prompt.

        Raises ValueError when the model has too few positions.
        """
        longest = max(len(prompt) for prompt in prompts)
        check_positions(self._module.model, longest, request.tokens)
        show = show or (lambda row, text: None)
        streams = [TextStream(self._tokenizer, prompt, request.stop) for prompt in prompts]
        length = _rounded(longest)
        shape = self._module.plan.padded_sequences(len(prompts)), length, _rounded(length + request.tokens - 1)
        for step, drawn in enumerate(self._steps(prompts, request, shape, first)):
            for row, (stream, token) in enumerate(zip(streams, drawn, strict=False)):
                if stream.end is None:
                    self.speed.new_tokens += step > 0
                    show(first + row, stream.add(int(token)))
            if all(stream.end for stream in streams):
                break
        for row, stream in enumerate(streams):
            show(first + row, stream.finish())
        return streams

    def _steps(self, prompts, request: Request, shape: tuple[int, int, int], first: int):
        """The tokens of every step, one for each sequence; the next step runs while those of one are used."""
        sequences, length, slots = shape
        rows = [i if i < len(prompts) else 0 for i in range(sequences)]  # more sequences are copies of the first
        tokens, starts = np.zeros((sequences, length), np.int32), np.zeros(sequences, np.int32)
        for row, number in enumerate(rows):
            starts[row] = length - len(prompts[number])
            tokens[row, starts[row] :] = prompts[number]
        prefill, decode = self._programs(shape, request)
        place = self._placed(prefill)
        numbers, seed = place(np.array(rows, np.int32) + first), place(np.int32(request.seed))
        starts, slot = place(starts), place(np.int32(length))
        begun = time.perf_counter()
        drawn, kept = prefill(self._params, place(tokens), starts, numbers, seed)
        values = np.asarray(drawn.addressable_data(0))
        self.speed.prefill_seconds += time.perf_counter() - begun
        self.speed.prompt_tokens += sum(map(len, prompts))
        begun = time.perf_counter()
        for _ in range(request.tokens - 1):
            following, kept, slot = decode(self._params, kept, drawn, slot, starts, numbers, seed)
            yield values
            drawn = following
            values = np.asarray(drawn.addressable_data(0))
            self.speed.decode_steps += 1
            self.speed.decode_seconds += time.perf_counter() - begun
            begun = time.perf_counter()
        yield values

    def _programs(self, shape: tuple[int, int, int], request: Request):
        (sequences, length, slots), key = shape, (*shape, request.draw, request.tokens > 1)
        if key not in self._compiled:
            begun, one = time.perf_counter(), dataclasses.replace(self._module, seq=1)
            whole = dataclasses.replace(self._module, seq=length)
            prefill = self._compile(prefill_program(whole, sequences, slots, request.draw))
            decode = self._compile(decode_program(one, sequences, slots, request.draw)) if request.tokens > 1 else None
            self._compiled[key] = prefill, decode
            self.speed.compile_seconds += time.perf_counter() - begun
        return self._compiled[key]

    def _compile(self, program: Program):
        return dataclasses.replace(program, arguments=(self._params, *program.arguments[1:])).compile()

    def _placed(self, prefill):
        """Puts an equal array of every process on all devices."""
        sharding = prefill.input_shardings[0][1]
        return lambda x: jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def in_compute_dtype(module: Transformer, params):
    """`params` with the kernels and tables in the dtype of `module`, which computes the same; deletes `params`."""
    dtype = jnp.dtype(module.dtype)

    def cast(path, x):
        return x.astype(dtype) if path[-1].key in ("kernel", "table") else x

    if dtype == jnp.float32:
        return params
    return jax.jit(lambda tree: jax.tree_util.tree_map_with_path(cast, tree), donate_argnums=0)(params)


def _gathered(module: Transformer, params):
    """Model and parameters with those that a step gathers at once gathered for all tokens."""
    if module.plan.shard not in ("optimizer", "gradients"):
        return module, params
    whole = jax.jit(lambda params: gather_parameters(module, params))(params)
    return dataclasses.replace(module, plan=dataclasses.replace(module.plan, shard="none")), whole


def _rounded(count: int) -> int:
    return -(-count // SLOTS) * SLOTS
