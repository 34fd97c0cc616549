"""Computes the validation loss of a run's newest checkpoint, or of a Hugging Face folder, on any mesh and data."""

import dataclasses
import math

from mstrain.checks import at_least
from mstrain.cli import Command, describe_keys, own_config
from mstrain.commands.recorded import Source


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(Source):
    """One evaluation. Keys of train choose mesh, algorithms and other data: mesh=4x2, data=text data.path=FILE."""

    batches: int | None = None
    """Validation batches; null takes all of them."""

    def __post_init__(self):
        super().__post_init__()
        if self.batches is not None:
            at_least("", self, batches=1)


def load_config(arguments: list[str]) -> EvaluateConfig:
    return own_config(EvaluateConfig, arguments)[0]


def main(arguments: list[str]) -> int:
    from rich.table import Table

    from mstrain.job.job import joined
    from mstrain.job.process_info import find_process
    from mstrain.training.evaluate import EvalConfig, Evaluator
    from mstrain.training.prepare import prepare

    own, given = own_config(EvaluateConfig, arguments)
    config = own.config(given)
    process, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(process, config.hosts, config.run_dir, devices) as job:
        run = prepare(config, job, shard_if_possible=True)
        name, params = own.parameters(job, run.module)
        batches = EvalConfig(batches=own.batches or 2**62)
        evaluator = Evaluator(batches, run.module, run.corpus.validation, run.validation_feed)
        nats = evaluator.measure(params)
        table = Table("Result", "Value", title=name, title_justify="left")
        table.add_row("tokens", f"{evaluator.batches * config.batch * config.seq:,} of {config.data.source}")
        table.add_row("loss", f"{nats:.4f} nats/token")
        table.add_row("perplexity", f"{math.exp(nats):.3f}")
        if evaluator.bits_per_byte is not None:
            table.add_row("bits per byte", f"{evaluator.bits_per_byte:.4f}")
        table.add_row("unigram model", f"{evaluator.unigram_nats:.4f} nats/token")
        run.console.print(table)
    return 0


def help_lines(_: list[str]) -> list[str]:
    return describe_keys(EvaluateConfig, "evaluate")


COMMAND = Command("evaluate", main, (__doc__ or "").strip(), load_config, help_lines, folder=None)
