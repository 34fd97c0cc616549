"""The input of a search: a training step, the devices, and the choices that are fixed."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from mstrain.gemm import ALGORITHMS
from mstrain.hardware import mfu
from mstrain.hardware.chips import element_bytes
from mstrain.hardware.pod import Pod
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig
from mstrain.models.flops import training_flops_per_token
from mstrain.models.parallel import ParallelConfig
from mstrain.models.remat import planned
from mstrain.parallel import schedules
from mstrain.planner.execution import ExecutionStyle, style_named
from mstrain.program.optimizer import OptimizerConfig
from mstrain.program.step_config import StepConfig

MEMORY_MARGIN = 0.1  # fraction of a device's memory left free for fragmentation and the compiler's workspace
SHARDS = ("none", "optimizer", "gradients", "parameters")
"""State that is sharded over the data-parallel devices: none, or that of ZeRO 1, 2 and 3."""
TENSOR = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.costed)
"""The algorithms of tensor products that the cost model knows."""
SCHEDULES = tuple(sorted(schedules.SCHEDULES))
"""In the order of the search, 1f1b first: of plans with equal times, the first one is chosen."""


@dataclass(frozen=True)
class Fixed:
    """Fixed choices; the search chooses those that are None.

    Attributes:
      data, tensor, context, pipeline, expert: parallel degrees; expert divides data.
      shape: (rows, cols) of the tensor-parallel devices.
      microbatches: number per step and replica, accumulate= of train.py.
      remat: remat= of train.py, or another policy of `mstrain.planner.remat`.
      shard: one of SHARDS.
      schedule: one of SCHEDULES; the interleaved one has `interleave` chunks per stage.
      staged: whether plans without pipeline stages are excluded.
    """

    data: int | None = None
    tensor: int | None = None
    context: int | None = None
    pipeline: int | None = None
    shape: tuple[int, int] | None = None
    microbatches: int | None = None
    remat: str | None = None
    shard: str | None = None
    schedule: str | None = None
    interleave: int | None = None
    expert: int | None = None
    staged: bool = False

    def allows(self, name: str, degree) -> bool:
        """Whether the choice `name` is open, or fixed to `degree`."""
        return getattr(self, name) in (None, degree)

    @classmethod
    def of(cls, step: StepConfig) -> "Fixed":
        """The choices that the configuration of a step fixes; `remat=auto` leaves remat open."""
        pipeline = step.pipeline
        per_stage = pipeline.interleave or (2 if pipeline.schedule == "interleaved" else 1)
        return cls(
            pipeline=len(pipeline.layers.split()) // per_stage if pipeline.layers else None,
            microbatches=step.accumulate, remat=planned(step.remat, step.offload), shard=step.shard,
            schedule=pipeline.schedule, interleave=per_stage if per_stage > 1 else None,
        )  # fmt: skip

    def on(self, mesh: MeshShape) -> "Fixed":
        """A copy with the degrees of a mesh of train.py fixed."""
        shape = mesh.row, mesh.col
        return replace(
            self, data=mesh.copies, expert=mesh.expert, context=mesh.context, pipeline=mesh.stage, shape=shape
        )


@dataclass(frozen=True)
class PlanRequest:
    """A training step of `model` on `pod`.

    Attributes:
      parallel: the tensor-parallel algorithms to choose from.
      batch: sequences per step of the whole job.
      seq: tokens per sequence.
      dtype: dtype of activations and products: bf16 or f32, or JAX's names.
      fixed: the choices that are fixed.
      memory_margin: fraction of a device's memory that must stay free.
      stated_style: execution style of another system than train.py.
      optimizer: optimizer of train.py, for the size of its state.

    Raises ValueError for a model with `mtp_layers`, which the planner does not support.
    """

    model: ModelConfig
    pod: Pod
    parallel: tuple[ParallelConfig, ...]
    batch: int
    seq: int
    dtype: str = "bf16"
    fixed: Fixed = field(default_factory=Fixed)
    memory_margin: float = MEMORY_MARGIN
    stated_style: ExecutionStyle | None = None
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self):
        if self.model.mtp_layers:
            raise ValueError(
                f"model {self.model.name} has model.mtp_layers={self.model.mtp_layers}, whose time and memory the "
                "planner does not know. Type mesh= and the other keys of a plan; train.py check=true target=SLICE "
                "compiles the step."
            )

    @classmethod
    def of(cls, step: StepConfig, pod: Pod) -> "PlanRequest":
        """The request for a step of train.py, with the choices of its configuration fixed."""
        parallel, fixed = (step.parallel,), Fixed.of(step)
        return cls(step.model, pod, parallel, step.batch, step.seq, step.dtype, fixed, optimizer=step.optimizer)

    @cached_property
    def layer_groups(self) -> tuple[tuple["PlanRequest", int], ...]:
        """Groups of equal layers in order: (this request for a model with only such layers, number of layers)."""
        groups = self.model.layer_groups
        return tuple((replace(self, model=model) if len(groups) > 1 else self, count) for model, count in groups)

    @property
    def optimizer_keys(self) -> dict[str, str]:
        """The keys of train.py for an optimizer whose state differs from that of the default optimizer."""
        given = {"optimizer.name": self.optimizer.name, "optimizer.moments": self.optimizer.moments}
        default = OptimizerConfig()
        return {key: value for key, value in given.items() if value != getattr(default, key.partition(".")[2])}

    @cached_property
    def style(self) -> ExecutionStyle:
        """The execution style of the system that runs the step; train.py unless another is stated."""
        return self.stated_style or style_named("mstrain-gpu" if self.pod.chip.platform == "gpu" else "mstrain")

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return self.style.activation_bytes or element_bytes(self.dtype)

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes of one device's memory that a plan may use."""
        return self.pod.memory_bytes * (1 - self.memory_margin)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq

    def utilization(self, seconds: float, attention: str = "full", extra: float = 0.0) -> float | None:
        """MFU, a fraction of the peak, of a step that takes `seconds`; None for a chip without a known peak.

        `attention`: `full` counts all attention scores (PaLM, appendix B), `causal` only those that are not masked.
        `extra`: FLOPs per token in addition to those of the model.
        """
        flops = training_flops_per_token(self.model, self.seq, attention) + extra
        return mfu(self.tokens * flops, seconds, self.pod.devices, self.pod.chip.peak(self.dtype))
