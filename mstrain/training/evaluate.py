"""Validation loss on a fixed set of batches, in nats per token and bits per byte of text."""


import jax

from mstrain.data import Batches, unigram_nats_per_token
from mstrain.training.feed import Feed
from mstrain.training.reporter import Reporter
from mstrain.training.run import Run
from mstrain.training.step import State, mean_loss

FIXED_SEED = 0  # the validation batches of every run of one corpus are the same


class Evaluator:
    """Called as a hook; keeps the last result in `nats` and `bits_per_byte`."""

    def __init__(self, run: Run, reporter: Reporter):
        config, module = run.config, run.module
        microbatch = config.batch // config.accumulate
        batches = Batches(run.corpus.validation, config.seq, microbatch, FIXED_SEED)
        self._feed = Feed(batches, module.plan.mesh, 1)
        self._batches = min(config.eval.batches, batches.batches_per_epoch)
        self._loss = jax.jit(lambda params, tokens: mean_loss(module, params, tokens[0]))
        self._file, self._reporter = run.corpus.validation, reporter
        self.unigram_nats = unigram_nats_per_token(self._file)
        self.nats: float | None = None

    @property
    def unigram_bits_per_byte(self) -> float | None:
        return self._file.bits_per_byte(self.unigram_nats)

    @property
    def bits_per_byte(self) -> float | None:
        """None before the first evaluation, and for a corpus without text."""
        return None if self.nats is None else self._file.bits_per_byte(self.nats)

    def __call__(self, step: int, state: State) -> None:
        losses = [self._loss(state["params"], self._feed(i)) for i in range(self._batches)]
        self.nats = float(sum(jax.device_get(losses)) / len(losses))
        values = {"validation_loss": self.nats}
        if self.bits_per_byte is not None:
            values |= {"bits_per_byte": self.bits_per_byte}
        self._reporter.evaluation(step, values)
