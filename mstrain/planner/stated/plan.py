"""A training step as stated: nothing is searched, and nothing is limited to what train.py runs."""

import math
from dataclasses import dataclass

from mstrain.checks import one_of
from mstrain.models.config import ModelConfig
from mstrain.planner.stated.execution import ExecutionStyle
from mstrain.planner.stated.fabric import Fabric, Group
from mstrain.planner.stated.remat import Remat

SHARDS = ("none", "optimizer", "gradients", "parameters")
"""What is sharded over the data-parallel devices: nothing, or ZeRO 1, 2 and 3."""
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees, innermost first: neighbors of the tensor axis are neighboring devices."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class StatedPlan:
    """Degrees and choices of one plan.

    Attributes:
      sequence_parallel: norms and residuals are sharded over the tensor devices.
      shard: of SHARDS; schedule: of SCHEDULES, with `interleave` chunks a stage.
      microbatch: sequences of one microbatch of one replica.
    """

    degrees: Degrees
    style: ExecutionStyle
    remat: Remat
    microbatch: int = 1
    sequence_parallel: bool = False
    shard: str = "none"
    schedule: str = "1f1b"
    interleave: int = 1

    def __post_init__(self):
        one_of("shard", self.shard, SHARDS)
        one_of("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
class StatedStep:
    """A step of `batch` sequences of `seq` tokens by `plan` on the devices of `fabric`."""

    model: ModelConfig
    fabric: Fabric
    plan: StatedPlan
    batch: int
    seq: int
    dtype: str = "bf16"

    @property
    def vocab_size(self) -> int:
        """Of the model, which every stated step knows."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size

    @property
    def microbatches(self) -> int:
        """Per replica and step."""
        return self.batch // self.plan.degrees.data // self.plan.microbatch

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device, before sharding over the tensor axis."""
        return self.plan.microbatch * self.seq // self.plan.degrees.context

    @property
    def activation_bytes(self) -> int:
        return self.plan.style.activation_bytes or (2 if self.dtype in ("bf16", "bfloat16") else 4)

    @property
    def layers(self) -> float:
        """Of one stage."""
        return self.model.layers / self.plan.degrees.pipeline

    def group(self, axis: str) -> Group:
        """The devices of an axis: tensor, context, data, pipeline, or `replica` (data x context)."""
        degrees = self.plan.degrees
        strides = {"tensor": 1, "context": degrees.tensor, "replica": degrees.tensor}
        strides["data"] = degrees.tensor * degrees.context
        strides["pipeline"] = strides["data"] * degrees.data
        size = degrees.data * degrees.context if axis == "replica" else getattr(degrees, axis)
        return self.fabric.group(size, strides[axis])


def check_step(step: StatedStep) -> None:
    """Raises ValueError, with the numbers, for a step that cannot run as stated."""
    plan, model = step.plan, step.model
    degrees = plan.degrees
    if degrees.devices != step.fabric.devices:
        raise ValueError(
            f"data {degrees.data} x tensor {degrees.tensor} x pipeline {degrees.pipeline} x context {degrees.context} "
            f"is {degrees.devices} devices, and the cluster has {step.fabric.devices}."
        )
    if step.batch % (degrees.data * plan.microbatch):
        raise ValueError(
            f"batch {step.batch} does not divide into {degrees.data} replicas of microbatches of {plan.microbatch}."
        )
    if model.layers < degrees.pipeline:
        raise ValueError(f"pipeline {degrees.pipeline} has more stages than the model has layers ({model.layers}).")
    if step.seq % degrees.context:
        raise ValueError(f"context {degrees.context} does not divide seq {step.seq}.")
    if math.gcd(model.heads, degrees.tensor) != degrees.tensor:
        raise ValueError(f"tensor {degrees.tensor} does not divide heads {model.heads}.")
