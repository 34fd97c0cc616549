"""DistIR's own pipeline schedule, beside those of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from mstrain.simulator import schedules
from mstrain.simulator.schedules import BACKWARD, FORWARD, SCHEDULES, Schedule, Task


def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`. Raises ValueError for an unknown name or more chunks than it can use."""
    if name == "distir" and chunks == pipeline:
        return distir(pipeline, microbatches)
    if name not in ("distir", *SCHEDULES):
        raise ValueError(f"schedule {name!r} is unknown; choose one of {' '.join(('distir', *SCHEDULES))}")
    return schedules.schedule("1f1b" if name == "distir" else name, pipeline, microbatches, chunks)


def distir(pipeline: int, microbatches: int) -> Schedule:
    """DistIR's "PipeDream 1F1B": stages alternate directions, and nothing limits the warm-up.

    Stage s holds up to min(microbatches, 2 (pipeline - s) - 1) microbatches in flight.
    """
    return _alternating(pipeline, microbatches, tuple(range(pipeline)), True)


def distir_forward(stage_of_chunk: Sequence[int], microbatches: int) -> Schedule:
    """DistIR's schedule of a model without backward pass, chunks placed on stages by `stage_of_chunk`."""
    return _alternating(max(stage_of_chunk) + 1, microbatches, tuple(stage_of_chunk), False)


@lru_cache(maxsize=256)
def _alternating(pipeline: int, microbatches: int, stage_of_chunk: tuple[int, ...], backward: bool) -> Schedule:
    num_chunks = len(stage_of_chunk)
    last = [BACKWARD] * pipeline
    ready: list[tuple[list, list]] = [([], []) for _ in range(pipeline)]
    ready[0][FORWARD].extend((m, 0) for m in range(microbatches))
    remaining = microbatches * num_chunks * (2 if backward else 1)
    steps = []
    while remaining:
        step = []
        for stage in range(pipeline):
            wanted = BACKWARD if last[stage] == FORWARD else FORWARD
            direction = wanted if ready[stage][wanted] else 1 - wanted
            queue = ready[stage][direction]
            if queue:
                entry = min(queue)
                queue.remove(entry)
                step.append(Task(stage, entry[1], direction, entry[0]))
                last[stage] = direction
        for task in step:
            if task.direction == FORWARD and task.chunk + 1 < num_chunks:
                follower = (task.chunk + 1, FORWARD)
            elif task.direction == FORWARD:
                follower = (task.chunk, BACKWARD) if backward else None
            else:
                follower = (task.chunk - 1, BACKWARD) if task.chunk else None
            if follower:
                ready[stage_of_chunk[follower[0]]][follower[1]].append((task.microbatch, follower[0]))
        remaining -= len(step)
        steps.append(tuple(step))
    return tuple(steps)


def bubble_fraction(steps: Schedule, pipeline: int) -> float:
    """Idle stage-steps over all stage-steps, counting every task as one step."""
    return 1.0 - sum(map(len, steps)) / (len(steps) * pipeline)
