"""The stages of a planned pipeline: layers, times of passes, and microbatches in flight."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mstrain.models.stages import even_layers
from mstrain.parallel.schedules import WHOLE, deferred_slots, lockstep_slots, warm_up
from mstrain.planner.layer import Pass
from mstrain.planner.plan import PodPlan


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers, and the times of one microbatch on one device.

    Attributes:
      chunks: layers [begin, end) of each chunk; several chunks if the schedule is interleaved.
      holds: number of layers of each of `PlanRequest.layer_groups` whose weights it has.
      computes: number of layers of each group that it computes.
      useful_forward, useful_backward: the passes without recomputation.
      repeated: recomputation in the backward pass.
      host: exposed seconds of offloading.
      weights: seconds of the products of weight gradients.
      in_flight: microbatches between their forward and backward passes; a fraction if the schedule is interleaved.
      deferred: microbatches with deferred weight gradients.
      ends: whether it has (the embedding, the output projection).
    """

    chunks: tuple[tuple[int, int], ...]
    holds: tuple[int, ...]
    computes: tuple[int, ...]
    useful_forward: Pass
    useful_backward: Pass
    repeated: Pass
    host: float
    weights: float
    in_flight: float
    deferred: int
    ends: tuple[bool, bool]

    @property
    def layers(self) -> int:
        return sum(end - begin for begin, end in self.chunks)

    @property
    def forward(self) -> float:
        return self.useful_forward.seconds

    @cached_property
    def backward(self) -> float:
        return self.useful_backward.seconds + self.repeated.seconds + self.host

    @cached_property
    def seconds(self) -> float:
        return self.forward + self.backward


def cycle_seconds(stages: list[Stage], message: float, schedule: str) -> float:
    """Seconds between microbatches in a full pipeline; `message` is the seconds of a send between stages."""
    if schedule == "gpipe":
        return max(stage.forward for stage in stages) + max(stage.backward for stage in stages)
    if schedule in ("interleaved", "zero-bubble"):
        return max(stage.seconds for stage in stages)
    behind, loops = 0.0, []
    for count, stage in enumerate(reversed(stages)):
        behind += stage.seconds
        loops.append(max(stage.seconds, (behind + 2 * count * message) / (count + 1)))
    return max(loops)


def split_layers(layers: int, pipeline: int, head: float) -> list[tuple[int, int]]:
    """Layers [begin, end) of each stage, so that the slowest stage takes the least time.

    The last stage has fewer layers, because its output projection takes the time of `head` layers. The other stages
    divide the remaining layers evenly; if there is a remainder, the first of them have one layer more.
    """
    if pipeline == 1:
        return [(0, layers)]
    others = pipeline - 1
    fewest = min(
        range(1, layers - others + 1), key=lambda last: (max(-(-(layers - last) // others), last + head), -last)
    )
    return bounds_of((*even_layers(layers - fewest, others), fewest))


def bounds_of(counts: Iterable[int]) -> list[tuple[int, int]]:
    """[begin, end) of consecutive parts with `counts` layers."""
    return list(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def layers_by_group(layers: tuple[int, int], counts: list[int]) -> tuple[int, ...]:
    """How many of the layers [begin, end) are in each group, in a model whose groups have `counts` layers in order."""
    begin, end = layers
    return tuple(max(0, min(end, last) - max(begin, first)) for first, last in bounds_of(counts))


def microbatches_in_flight(plan: PodPlan, stage: int, lockstep: bool) -> float:
    """Largest number of microbatches between their forward and backward passes on `stage`.

    In `lockstep`, every stage has memory for as many as the first stage needs.
    """
    passes, name = plan.microbatches * plan.chunks, plan.schedule
    if lockstep and plan.pipeline > 1:
        return lockstep_slots(name, plan.pipeline, plan.microbatches, plan.chunks) / plan.chunks
    deferred = microbatches_deferred(plan, stage, lockstep) - 1 if name == "zero-bubble" else 0
    name = name if name == "gpipe" or plan.chunks > 1 else "1f1b"
    return min(passes, warm_up(name, plan.pipeline, stage, passes, plan.chunks) + 1 + deferred) / plan.chunks


def microbatches_deferred(plan: PodPlan, stage: int, lockstep: bool) -> int:
    """Largest number of microbatches with deferred weight gradients on `stage`; 0 for schedules that defer none."""
    if plan.schedule in WHOLE or plan.pipeline == 1:
        return 0
    if lockstep:
        return deferred_slots(plan.schedule, plan.pipeline, plan.microbatches)
    return min(plan.microbatches, stage + 1)
