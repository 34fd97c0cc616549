"""Continues a prompt with a run's newest checkpoint or a Hugging Face folder, on any mesh, without data."""

import dataclasses

from mstrain.checks import at_least
from mstrain.cli import Command, describe_keys, own_config
from mstrain.commands.recorded import Source


@dataclasses.dataclass(frozen=True)
class ContinueConfig(Source):
    """One sample. Keys of train choose mesh and algorithms: mesh=4x2."""

    prompt: str = "def __init__(self"
    """Text to continue."""
    tokens: int = 100
    """Tokens to sample; prompt and sample together end at the run's sequence length."""
    temperature: float = 0.7
    """Sampling temperature; 0 takes the most likely token."""
    seed: int = 0
    """Seed of the sample."""

    def __post_init__(self):
        super().__post_init__()
        at_least("", self, tokens=1, temperature=0, seed=0)


def load_config(arguments: list[str]) -> ContinueConfig:
    return own_config(ContinueConfig, arguments)[0]


def main(arguments: list[str]) -> int:
    from mstrain.job.job import joined
    from mstrain.job.process_info import find_process
    from mstrain.training.prepare import build_module
    from mstrain.training.sample import SampleConfig, sample
    from mstrain.training.summary import smallest

    own, given = own_config(ContinueConfig, arguments)
    config = own.config(given)
    process, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(process, config.hosts, config.run_dir, devices) as job:
        module, tokenizer, chip, console = build_module(config, job)
        _, params = own.parameters(job, module)
        wanted = SampleConfig(own.prompt, own.tokens, own.temperature)
        text = sample(wanted, tokenizer, *smallest(config, module, chip), params, own.seed)
        console.print(text, markup=False)
    return 0


def help_lines(_: list[str]) -> list[str]:
    return describe_keys(ContinueConfig, "sample")


COMMAND = Command("sample", main, (__doc__ or "").strip(), load_config, help_lines, folder=None)
