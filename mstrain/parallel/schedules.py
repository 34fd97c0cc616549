"""Pipeline schedules: which stage runs which microbatch, in which order.

A schedule is a list of time steps; a step is the tasks that different stages run side by side. The steps fix an order;
the simulator computes the times. Chunks are consecutive parts of the model; with `pipeline` stages, chunk c runs on
stage c mod `pipeline` (more chunks than stages: interleaved).

The program that train.py compiles runs all stages in lockstep (`ticks`): in a tick, every stage runs at most one
forward pass and then at most one backward pass. With equal stages the bubble is that of the schedule without lockstep:
p - 1 forward and backward passes of a chunk on each of p stages.
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


def warm_up(name: str, pipeline: int, stage: int, passes: int, per_stage: int, lockstep: bool = False) -> int:
    """Forward passes of a stage before its first backward pass.

    GPipe runs all (Huang et al., 2019); 1F1B and its interleaved form (Narayanan et al., 2021, section 2.2) as few as
    keep the later stages busy. In lockstep, 1F1B needs as many as the interleaved form with one chunk per stage: a
    microbatch returns after 2 x later ticks.
    """
    later = pipeline - stage - 1
    one = 2 * later if lockstep else later
    return min(passes, {"gpipe": passes, "1f1b": one, "interleaved": 2 * later + (per_stage - 1) * pipeline}[name])


def lockstep_slots(name: str, pipeline: int, microbatches: int, per_stage: int) -> int:
    """Passes whose saved values every stage has memory for in lockstep: stages run one program, and the first holds
    most. A slot that the schedule leaves free is for passes that do not count.
    """
    return warm_up(name, pipeline, 0, microbatches * per_stage, per_stage, lockstep=True) + 1


@lru_cache(maxsize=256)
def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`. Raises ValueError for an unknown name, or chunks or microbatches it cannot use."""
    return _time_steps(_stage_orders(name, pipeline, microbatches, chunks), chunks)


@lru_cache(maxsize=256)
def ticks(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The same in lockstep: a step has at most one forward and one backward pass of every stage, in this order.

    A pass reads what the neighbor stage made in the step before. Raises ValueError as `schedule`.
    """
    return _time_steps(_stage_orders(name, pipeline, microbatches, chunks, lockstep=True), chunks, lockstep=True)


def _stage_orders(name: str, pipeline: int, microbatches: int, chunks: int, lockstep: bool = False) -> list[list[Task]]:
    """The tasks of every stage, the next one last."""
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
        warm = warm_up(name, pipeline, stage, len(forwards), per_stage, lockstep)
        pairs = zip(forwards[warm:], backwards)
        order = [*forwards[:warm], *(task for pair in pairs for task in pair), *backwards[len(forwards) - warm :]]
        orders.append(order[::-1])
    return orders


def _time_steps(orders: list[list[Task]], chunks: int, lockstep: bool = False) -> Schedule:
    """Steps in which every stage runs its next task as soon as what the task needs is done."""
    done: set[tuple[int, int, int]] = set()

    def ready(task: Task) -> bool:
        _, chunk, direction, microbatch = task
        if direction == FORWARD:
            return not chunk or (chunk - 1, FORWARD, microbatch) in done
        last = chunk + 1 == chunks
        return (chunk, FORWARD, microbatch) in done and (last or (chunk + 1, BACKWARD, microbatch) in done)

    def of_direction(task: Task, direction: int) -> bool:
        return not lockstep or task.direction == direction

    steps = []
    while any(orders):
        step: list[Task] = []
        for direction in (FORWARD, BACKWARD) if lockstep else (FORWARD,):
            nexts = [order for order in orders if order and of_direction(order[-1], direction) and ready(order[-1])]
            made = [order.pop() for order in nexts]
            done.update(task[1:] for task in made)
            step += made
        assert step, "the stage orders wait for each other"
        steps.append(tuple(step))
    return tuple(steps)
