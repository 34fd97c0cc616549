"""The pipeline schedule of DistIR, and those of `mstrain.parallel.schedules` by name."""

from collections.abc import Sequence
from functools import lru_cache

from mstrain.parallel import schedules
from mstrain.parallel.schedules import BACKWARD, FORWARD, WHOLE, Schedule, Task


def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`. Raises ValueError for an unknown name or an unsupported number of chunks."""
    if name == "distir" and chunks == pipeline:
        return alternating(tuple(range(pipeline)), microbatches)
    if name not in ("distir", *WHOLE):
        raise ValueError(f"schedule {name!r} is unknown; choose one of {' '.join(('distir', *WHOLE))}")
    return schedules.schedule("1f1b" if name == "distir" else name, pipeline, microbatches, chunks)


@lru_cache(maxsize=256)
def alternating(stage_of_chunk: Sequence[int], microbatches: int, backward: bool = True) -> Schedule:
    """The schedule that DistIR calls "PipeDream 1F1B": stages alternate between forward and backward passes.

    The number of forward passes before the first backward pass is not limited, so stage s of p has up to
    min(microbatches, 2 (p - s) - 1) microbatches in flight. Without `backward` there are only forward passes.
    """
    stages, chunks = max(stage_of_chunk) + 1, len(stage_of_chunk)
    last = [BACKWARD] * stages
    ready: list[tuple[set, set]] = [(set(), set()) for _ in range(stages)]  # (microbatch, chunk) by direction
    ready[0][FORWARD].update((m, 0) for m in range(microbatches))
    steps = []
    while any(any(queues) for queues in ready):
        step = []
        for stage, queues in enumerate(ready):
            wanted = BACKWARD if last[stage] == FORWARD else FORWARD
            direction = wanted if queues[wanted] else 1 - wanted
            if queues[direction]:
                microbatch, chunk = min(queues[direction])
                queues[direction].remove((microbatch, chunk))
                step.append(Task(stage, chunk, direction, microbatch))
                last[stage] = direction
        for _, chunk, direction, microbatch in step:
            if direction == FORWARD and chunk + 1 < chunks:
                ready[stage_of_chunk[chunk + 1]][FORWARD].add((microbatch, chunk + 1))
            elif backward and (direction == FORWARD or chunk):
                chunk -= direction == BACKWARD
                ready[stage_of_chunk[chunk]][BACKWARD].add((microbatch, chunk))
        steps.append(tuple(step))
    return tuple(steps)


def bubble_fraction(steps: Schedule, pipeline: int) -> float:
    """Idle fraction of the stages if every task takes one step."""
    return 1.0 - sum(map(len, steps)) / (len(steps) * pipeline)
