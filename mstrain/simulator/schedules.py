"""Pipeline schedules: which stage runs which microbatch, in which order.

A schedule is a list of time steps; a step is the tasks that different stages run side by side. The steps fix an order;
the simulator finds the times. Chunks are consecutive parts of the model; with `pipeline` stages, chunk c runs on stage
c mod `pipeline` (more chunks than stages: interleaved).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD = 0, 1
SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Task(NamedTuple):
    """One pass of one microbatch through one chunk, on `stage`; direction is FORWARD or BACKWARD."""

    stage: int
    chunk: int
    direction: int
    microbatch: int


Schedule = tuple[tuple[Task, ...], ...]


def warm_up(name: str, pipeline: int, stage: int, passes: int, per_stage: int) -> int:
    """Forward passes of a stage before its first backward pass.

    GPipe runs all (Huang et al., 2019); 1F1B and its interleaved form (Narayanan et al., 2021, section 2.2) as few as
    keep the later stages busy.
    """
    later = pipeline - stage - 1
    return min(passes, {"gpipe": passes, "1f1b": later, "interleaved": 2 * later + (per_stage - 1) * pipeline}[name])


@lru_cache(maxsize=256)
def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`. Raises ValueError for an unknown name, or chunks or microbatches it cannot use."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {' '.join(SCHEDULES)}")
    if chunks != pipeline and name != "interleaved":
        raise ValueError(
            f"schedule {name} runs one chunk per stage, not {chunks} chunks on {pipeline} stages; "
            "use schedule=interleaved"
        )
    if name == "interleaved" and (chunks % pipeline or microbatches % pipeline):
        raise ValueError(
            f"schedule interleaved needs chunks ({chunks}) and microbatches ({microbatches}) that are "
            f"multiples of the pipeline degree ({pipeline}); change them or use schedule=1f1b"
        )
    per_stage = chunks // pipeline
    block = pipeline if name == "interleaved" else microbatches  # microbatches that a chunk runs in a row
    orders = []
    for stage in range(pipeline):
        mine = range(stage, chunks, pipeline)
        forwards, backwards = (
            [
                Task(stage, chunk, direction, first + m)
                for first in range(0, microbatches, block)
                for chunk in (mine, mine[::-1])[direction]
                for m in range(block)
            ]
            for direction in (FORWARD, BACKWARD)
        )
        warm = warm_up(name, pipeline, stage, len(forwards), per_stage)
        pairs = zip(forwards[warm:], backwards)
        order = [*forwards[:warm], *(task for pair in pairs for task in pair), *backwards[len(forwards) - warm :]]
        orders.append(order[::-1])  # the next task is the last
    return _time_steps(orders, chunks)


def _time_steps(orders: list[list[Task]], chunks: int) -> Schedule:
    """Steps in which every stage runs its next task as soon as what the task needs is done."""
    done: set[tuple[int, int, int]] = set()

    def ready(task: Task) -> bool:
        _, chunk, direction, microbatch = task
        if direction == FORWARD:
            return not chunk or (chunk - 1, FORWARD, microbatch) in done
        last = chunk + 1 == chunks
        return (chunk, FORWARD, microbatch) in done and (last or (chunk + 1, BACKWARD, microbatch) in done)

    steps = []
    while any(orders):
        step = [order.pop() for order in [order for order in orders if order and ready(order[-1])]]
        assert step, "the stage orders wait for each other"
        done.update(task[1:] for task in step)
        steps.append(tuple(step))
    return tuple(steps)
