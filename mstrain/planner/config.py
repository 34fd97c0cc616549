"""What the planner for pods is asked."""

from dataclasses import dataclass

from mstrain.checks import at_least, one_of
from mstrain.models.config import ModelConfig
from mstrain.models.transformer import REMAT
from mstrain.simulator.schedules import SCHEDULES

TENSOR = ("meshslice", "megatron", "fsdp")
POD_SCHEDULES = tuple(name for name in SCHEDULES if name in ("1f1b", "gpipe", "interleaved"))


@dataclass(frozen=True)
class PodConfig:
    """A plan for a pod of equal devices.

    Attributes:
      cluster: a TPU slice (v5p-512, v6e:8x8) or CHIP:N GPUs that share NVLink (h200:8).
      batch: sequences per step of the whole job; seq: tokens per sequence.
      algorithm: auto, or the one of the tensor products: meshslice, megatron or fsdp.
      replicas, tensor, pipeline: auto, or that degree of data, tensor or pipeline parallelism.
      schedule: of the pipeline: 1f1b, gpipe or interleaved, with `interleave` chunks per stage (2).
      remat: auto, or what train.py's remat= may be: none, dots, full.
      dtype: of activations and products: bf16 or f32. Weights, gradients and moments are float32.
      memory_margin: part of a device's memory that must stay free.
      top_k: distinct plans shown; max_seconds: time after which the best plans so far are returned.
      simulate: simulate the winner and write trace and pictures; simulated_microbatches: at most so many of
        it.
      run_dir: where tables, pictures and plan.json go.
    """

    model: ModelConfig
    cluster: str = "v4-64"
    batch: int = 256
    seq: int = 2048
    algorithm: str = "auto"
    replicas: str = "auto"
    tensor: str = "auto"
    pipeline: str = "auto"
    schedule: str = "1f1b"
    interleave: int | None = None
    remat: str = "auto"
    dtype: str = "bf16"
    memory_margin: float = 0.1
    top_k: int = 5
    max_seconds: float = 60.0
    simulate: bool = True
    simulated_microbatches: int = 8
    run_dir: str = "runs/plan"

    def __post_init__(self):
        at_least("", self, batch=1, seq=1, top_k=1, simulated_microbatches=1)
        one_of("algorithm", self.algorithm, ("auto", *TENSOR))
        one_of("schedule", self.schedule, POD_SCHEDULES)
        if self.interleave is not None and (self.schedule != "interleaved" or self.interleave < 2):
            raise ValueError(
                f"interleave={self.interleave} has no effect with schedule={self.schedule}. Drop it, or type "
                "schedule=interleaved interleave=2."
            )
        one_of("remat", self.remat, ("auto", *REMAT))
        one_of("dtype", self.dtype, ("bf16", "f32"))
        for name in ("replicas", "tensor", "pipeline"):
            value = getattr(self, name)
            if value != "auto" and not (value.isdecimal() and int(value) > 0):
                raise ValueError(
                    f"{name}={value} is no degree. Type a whole number such as {name}=4, or {name}=auto."
                )
        if not 0 <= self.memory_margin < 1:
            raise ValueError(
                f"memory_margin={self.memory_margin} is no part of a memory. Type memory_margin=0.1."
            )
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds={self.max_seconds} leaves no time. Type max_seconds=60.")
        if self.model.position == "learned" and self.seq > self.model.context:
            raise ValueError(
                f"seq={self.seq} is longer than the {self.model.context} positions model {self.model.name} "
                f"learns. Type seq={self.model.context} or model.context={self.seq}."
            )

    @property
    def element_bytes(self) -> int:
        return {"bf16": 2, "f32": 4}[self.dtype]

    def chunks(self, pipeline: int) -> int:
        """Parts of the model per stage of such a pipeline."""
        return (self.interleave or 2) if self.schedule == "interleaved" and pipeline > 1 else 1

    def allows(self, name: str, degree: int) -> bool:
        """Whether the key `name` (replicas, tensor, pipeline) leaves this degree open."""
        return getattr(self, name) in ("auto", str(degree))
