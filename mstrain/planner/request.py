"""What the planner is asked: a training step, the devices it may use, and what is already decided."""

from dataclasses import dataclass, field

from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.planner.target import Pod

MEMORY_MARGIN = 0.1  # of a device's memory, for fragmentation and the compiler's workspace


@dataclass(frozen=True)
class Fixed:
    """What is not searched; None leaves a choice open.

    Attributes:
      data, tensor, pipeline: parallel degrees.
      shape: (rows, cols) of the tensor devices.
      microbatches: per step and replica; train.py's accumulate=.
      remat: train.py's remat=.
      schedule: of the pipeline: 1f1b, gpipe or interleaved, with `interleave` chunks per stage.
    """

    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    shape: tuple[int, int] | None = None
    microbatches: int | None = None
    remat: str | None = None
    schedule: str = "1f1b"
    interleave: int = 2

    def allows(self, name: str, degree) -> bool:
        """Whether the choice `name` may be `degree`."""
        return getattr(self, name) in (None, degree)

    def chunks(self, pipeline: int) -> int:
        """Parts of the model per stage of such a pipeline."""
        return self.interleave if self.schedule == "interleaved" and pipeline > 1 else 1


@dataclass(frozen=True)
class PlanRequest:
    """A training step of `model` on `pod`.

    Attributes:
      parallel: the algorithms to choose from.
      batch: sequences per step of the whole job; seq: tokens per sequence.
      dtype: of activations and products: bf16 or f32, or JAX's names. Weights, gradients and moments are float32.
      memory_margin: part of a device's memory that must stay free.
    """

    model: ModelConfig
    pod: Pod
    parallel: tuple[ParallelConfig, ...]
    batch: int
    seq: int
    dtype: str = "bf16"
    fixed: Fixed = field(default_factory=Fixed)
    memory_margin: float = MEMORY_MARGIN

    @property
    def element_bytes(self) -> int:
        return {"bf16": 2, "bfloat16": 2, "f32": 4, "float32": 4}[self.dtype]

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that a plan may use."""
        return self.pod.memory_bytes * (1 - self.memory_margin)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq
