"""Validation loss on a fixed set of batches, in nats per token and bits per byte of text."""

import dataclasses
import functools

import jax
import numpy as np

from mstrain.checks import at_least
from mstrain.data import TokenFile, TrainBatches, unigram_nats_per_token
from mstrain.models.transformer import Transformer
from mstrain.program.inference import loss_program
from mstrain.program.step import State
from mstrain.training.feed import Feed
from mstrain.training.reporter import Reporter


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation loss during training."""

    every: int = 100
    """Steps between evaluations. The last step is always evaluated."""
    batches: int = 8
    """Number of validation batches per evaluation, the same ones each time."""

    def __post_init__(self):
        at_least("eval", self, every=1, batches=1)


class Evaluator:
    """A hook that evaluates the model. The last result is in `nats`, of `targets` tokens, and `bits_per_byte`."""

    def __init__(
        self,
        config: EvalConfig,
        module: Transformer,
        file: TokenFile,
        feed: Feed[TrainBatches],
        reporter: Reporter | None = None,
    ):
        self._feed = feed
        self.batches = min(config.batches, feed.batches.batches_per_epoch)
        self._module = module
        self._file, self._reporter = file, reporter
        self.unigram_nats = unigram_nats_per_token(self._file)
        self.nats: float | None = None
        self.targets = 0

    @property
    def unigram_bits_per_byte(self) -> float | None:
        return self._file.bits_per_byte(self.unigram_nats)

    @property
    def bits_per_byte(self) -> float | None:
        """None before the first evaluation, and for a corpus without text."""
        return None if self.nats is None else self._file.bits_per_byte(self.nats)

    @functools.cached_property
    def _loss(self):
        return loss_program(self._module, self._feed.abstract).compile()

    def measure(self, params) -> float:
        """Mean nats per token over the batches, also kept in `nats`."""
        measured = jax.device_get([self._loss(params, self._feed(i)) for i in range(self.batches)])
        losses, counts = np.array(measured, np.float64).T
        self.targets = round(counts.sum() * self._feed.abstract.tokens.shape[0])
        self.nats = float(losses @ counts / counts.sum())
        return self.nats

    def __call__(self, step: int, state: State) -> None:
        self.measure(state["params"])
        values = {"validation_loss": self.nats}
        if self.bits_per_byte is not None:
            values |= {"bits_per_byte": self.bits_per_byte}
        if self._reporter:
            self._reporter.evaluation(step, values)
