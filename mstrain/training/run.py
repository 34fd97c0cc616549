"""A prepared run: everything that the training loop and its hooks need. `mstrain.training.prepare` builds it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from mstrain.data import Batch, Corpus, TrainBatches
from mstrain.hardware import Chip, mfu, step_options
from mstrain.job.job import ALONE, Job
from mstrain.mesh import platform_of
from mstrain.models.flops import training_flops_per_token
from mstrain.models.transformer import Transformer
from mstrain.program.memory import Memory, memory_of
from mstrain.program.optimizer import schedule_of
from mstrain.program.step import State
from mstrain.training.config import RunConfig
from mstrain.training.feed import Feed
from mstrain.training.goodput import Goodput
from mstrain.training.prediction import Prediction, predict


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a training loop needs; arrays are created by `mstrain.training.loop`."""

    config: RunConfig
    corpus: Corpus
    module: Transformer
    optimizer: optax.GradientTransformation
    feed: Feed[TrainBatches]
    validation_feed: Feed[TrainBatches]
    chip: Chip | None
    console: Console
    job: Job = ALONE
    goodput: Goodput = dataclasses.field(default_factory=Goodput)

    @functools.cached_property
    def compiled_step(self):
        """The compiled step for this run's shapes, with the chip's compiler options."""
        parts = self.feed.batches.parts
        step = self.config.step_config(self.module.model, self.module.dtype)
        program = step.program(self.module, self.optimizer, self.config.seed, parts)
        platform = platform_of(self.module.plan.mesh)
        options = program.compiler_options | step_options(platform, self.flops * self.config.steps)
        with self.goodput.spend("compile"):
            return program.compile(options)

    @functools.cached_property
    def schedule(self) -> jax.Array:
        """The numbers of the learning rate's schedule, replicated on the mesh."""
        numbers = schedule_of(self.config.optimizer, self.config.steps)
        replicated = NamedSharding(self.module.plan.mesh, P())
        return jax.make_array_from_callback(numbers.shape, replicated, lambda index: numbers[index])

    def step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """One update by the compiled step: (state, metrics). It donates `state`."""
        return self.compiled_step(state, batch, self.schedule)

    @functools.cached_property
    def memory(self) -> Memory:
        return memory_of(self.compiled_step, self.module.plan.mesh)

    @functools.cached_property
    def prediction(self) -> Prediction | None:
        """The predicted time of a step; None where nothing is known of the devices."""
        return predict(self.config, self.module, self.chip, self.job, lambda: self.compiled_step.as_text() or "")

    def mfu(self, step_seconds: float) -> float | None:
        """Model FLOP/s of a step over the peak of the mesh's devices; None when the peak is unknown."""
        return mfu(self.flops, step_seconds, self.module.plan.mesh.size, self.peak)

    @functools.cached_property
    def flops(self) -> float:
        """Model FLOPs of one step, recomputation not counted."""
        return self.config.tokens * training_flops_per_token(self.module.model, self.config.seq)

    @property
    def peak(self) -> float | None:
        """Peak FLOP/s of one device in the compute dtype, or None when unknown."""
        return self.chip.peak(jnp.dtype(self.module.dtype).name) if self.chip else None
