"""What a training step is compiled from, beside its devices. train.py, benchmark.py and the tuner make steps of it."""

import dataclasses

import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from mstrain.data import CONCATENATED, Batch
from mstrain.gemm.precision import Precision
from mstrain.hardware import Chip, TpuSlice
from mstrain.hardware.pod import tuning_constants
from mstrain.mesh import shape_of
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import ModelPlan, make_plan
from mstrain.models.precision import in_precision
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.program import Program
from mstrain.program.step import step_program


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The keys of train.py that decide which step is compiled for a mesh.

    Attributes:
      batch: sequences per step of the whole job, in `accumulate` microbatches; seq: tokens per sequence.
      dtype: of activations and products, by JAX's name.
      products: their precision, of `precision=` and `travel=`.
    """

    model: ModelConfig
    batch: int
    seq: int
    parallel: ParallelConfig = ParallelConfig()
    accumulate: int = 1
    dtype: str = "bfloat16"
    remat: str = "none"
    offload: str | None = None
    shard: str = "none"
    pipeline: PipelineConfig = PipelineConfig()
    products: Precision = Precision()
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def microbatch(self) -> int:
        """Sequences of the whole job in one microbatch."""
        return self.batch // self.accumulate

    def plan(self, mesh: Mesh | AbstractMesh, machine: Chip | TpuSlice | None) -> ModelPlan:
        """The plan on a mesh, whose devices `machine` has (None: unknown); raises ValueError if it is illegal."""
        chip = machine.chip if isinstance(machine, TpuSlice) else machine
        constants = tuning_constants(machine, shape_of(mesh), self.dtype)
        plan = make_plan(
            self.parallel, self.model, mesh, self.microbatch, self.seq, chip, constants, self.shard, self.pipeline
        )
        return in_precision(plan, self.products)

    def module(self, plan: ModelPlan) -> Transformer:
        return Transformer(self.model, plan, self.seq, jnp.dtype(self.dtype), self.remat, self.offload)

    def make_optimizer(self, seed: int = 0) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer.for_width(self.model.width), seed)

    def program(
        self, module: Transformer, optimizer: optax.GradientTransformation, seed: int = 0, parts: Batch = CONCATENATED
    ) -> Program:
        """The step of its module and optimizer, with the `parts` of Batch; `seed` is that of the run."""
        return step_program(module, optimizer, self.batch, self.accumulate, parts, self.optimizer.sums(seed))
