"""Continues prompts with a checkpoint of a run or a Hugging Face folder, on any mesh, without data."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import yaml

from mstrain.checks import at_least
from mstrain.cli import Command
from mstrain.commands.prompts import read_prompts, text_of
from mstrain.commands.recorded import Source, check_new_file, help_of, on_one_device, source_config
from mstrain.program.inference import Draw
from mstrain.training.config import RunConfig

EXAMPLE = 'stop=\'["\\n\\n", "class "]\''


@dataclasses.dataclass(frozen=True)
class ContinueConfig(Source):
    """One sample. Keys of train choose mesh and algorithms: mesh=4x2. Text is printed as it is made, the speed to
    standard error."""

    prompt: str | None = None
    """Text to continue; null takes that of the run (sample.prompt)."""
    prompts: str | None = None
    """File of prompts, one per line, or `.jsonl` with objects that have `prompt` (with chat=true also `messages`),
    instead of prompt=. batch= of them run at once."""
    chat: bool = False
    """Format a prompt as the question of a conversation, with the chat template of the tokenizer."""
    tokens: int = 100
    """Largest number of tokens to sample for a prompt. With learned positions, prompt and sample have at most
    `model.context` tokens."""
    temperature: float = 0.7
    """Sampling temperature; 0 takes the most likely token."""
    top_k: int = 0
    """Sample from this number of most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to this; 1 for all."""
    seed: int = 0
    """Seed of the samples. A prompt's sample does not depend on the other prompts, batch= or mesh=, up to rounding."""
    stop: str | None = None
    """Text that ends a sample and is not part of it; several as a YAML list: stop='["\\n\\n", "class "]'."""
    out: str | None = None
    """New file for the results, one JSON object per prompt: prompt, text, tokens, end."""

    def __post_init__(self):
        super().__post_init__()
        at_least("", self, tokens=1, temperature=0, top_k=0, seed=0)
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("prompt= and prompts= are both given. Type one of them.")
        check_new_file("out", self.out)
        Draw(self.temperature, self.top_k, self.top_p)
        self.stops

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop`. Raises ValueError for a list that is not one of texts."""
        if self.stop is None:
            return ()
        if not self.stop.startswith("["):
            return (self.stop.replace("\\n", "\n"),)
        try:
            found = yaml.safe_load(self.stop)
        except yaml.YAMLError:
            found = None
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise ValueError(f"stop={self.stop} is not a list of texts. Type for example {EXAMPLE}.")
        return tuple(found)


def load_config(arguments: list[str]) -> ContinueConfig:
    return source_config(ContinueConfig, arguments)[0]


def main(arguments: list[str]) -> int:
    from mstrain.job.job import joined
    from mstrain.job.process_info import find_process
    from mstrain.mesh import attached, parse_mesh
    from mstrain.training.prepare import build_module

    own, given = source_config(ContinueConfig, arguments)
    prompts = None if own.prompts is None else read_prompts(own.prompts, own.chat)
    config = own.config(given if attached() else on_one_device(given))
    prompt = config.sample.prompt if own.prompt is None else own.prompt
    if config.mesh != "auto" and parse_mesh(config.mesh).stage > 1:
        raise ValueError(f"mesh={config.mesh}: sample does not use stages. Type a mesh= without axis stage.")
    process, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(process, config.hosts, config.run_dir, devices) as job:
        module, tokenizer, _ = build_module(with_weights_in_place(config), job, any_batch=True)
        if tokenizer is None:
            raise ValueError(f"{own} has no tokenizer to encode a prompt. Type tokenizer= of the model.")
        _sample(own, config, prompts or [prompt], job, module, tokenizer)
    return 0


def with_weights_in_place(config: RunConfig) -> RunConfig:
    """With dataflow `rs` where it is `auto` and can be chosen: of few tokens, products then move no weights."""
    from mstrain.gemm import find_algorithm
    from mstrain.models.parallel import layer_algorithms

    used = {find_algorithm(name) for names in layer_algorithms(config.parallel, config.model.layers) for name in names}
    free = [algorithm for algorithm in used if not algorithm.only_dataflow]
    if config.parallel.dataflow != "auto" or not free:
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, dataflow="rs"))


def _sample(own: ContinueConfig, config: RunConfig, prompts: list, job, module, tokenizer) -> None:
    from mstrain.data.recipes import chat_template
    from mstrain.training.files import replace
    from mstrain.training.generate import Generator, Request, check_positions, in_compute_dtype
    from mstrain.training.sample import encode_prompt

    template = chat_template(config.data, tokenizer) if own.chat else None
    encoded = [encode_prompt(tokenizer, text_of(prompt, template), special=own.chat) for prompt in prompts]
    request = Request(own.tokens, Draw(own.temperature, own.top_k, own.top_p), own.seed, own.stops)
    for ids in encoded:
        check_positions(module.model, len(ids), own.tokens)
    name, params = own.parameters(job, module)
    generator = Generator(module, in_compute_dtype(module, params), tokenizer)
    show = functools.partial(print, end="", flush=True) if job.leads else lambda text: None
    results = []
    for first in range(0, len(prompts), config.batch):
        batch = encoded[first : first + config.batch]
        written = ["" if own.chat else tokenizer.decode(ids) for ids in batch]  # a conversation shows answers only
        if len(prompts) == 1:
            show(written[0])
            streams = generator(batch, request, lambda row, text: show(text))
            show("\n")
        else:
            streams = generator(batch, request, first=first)
            for number, (text, stream) in enumerate(zip(written, streams, strict=True), first + 1):
                show(f"[{number}] {text}{stream.text}\n")
        for prompt, stream in zip(prompts[first : first + config.batch], streams, strict=True):
            result = {"prompt": prompt, "text": stream.text, "tokens": len(stream.ids), "end": stream.end}
            results.append(json.dumps(result, ensure_ascii=False) + "\n")
    if own.out and job.leads:
        replace(Path(own.out), "".join(results).encode())
    if job.leads:
        print(f"{name}: {generator.speed}", file=sys.stderr)


def help_lines(_: list[str]) -> list[str]:
    return help_of(ContinueConfig, "sample")


COMMAND = Command("sample", main, (__doc__ or "").strip(), load_config, help_lines, folder=None)
