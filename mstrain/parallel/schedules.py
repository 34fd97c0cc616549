"""Pipeline schedules: which stage runs which microbatch, in which order.

A schedule is a sequence of steps; a step is a set of tasks that different stages run concurrently. The steps define an
order; the simulator computes the times. Chunks are consecutive parts of the model; with `pipeline` stages, chunk c runs
on stage c mod `pipeline` (with more chunks than stages the schedule is interleaved).

In schedule zero-bubble, a backward pass (BACKWARD) computes the gradients of activations only, for which the previous
stage waits. The weight gradients (WEIGHTS) are deferred to times at which a stage would otherwise wait. The schedule is
ZB-H1 of Qi et al., 2024; every stage has at most as many microbatches in flight as the first stage of 1F1B. With
seconds F, B and W of the three kinds of pass, its bubble is (p - 1) (F + B - W) on each of p stages; that of 1F1B is
(p - 1) (F + B + W).

The program that train.py compiles runs all stages in lockstep (`ticks`): in a tick, every stage runs at most one pass
of each direction, in their order. With equal stages the bubble is that of the schedule without lockstep: p - 1 forward
and backward passes of a chunk on each of p stages. With zero-bubble it is (p - 1) (F + B), because no stage can compute
weight gradients while another runs a pass.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = DIRECTIONS = 0, 1, 2
WAIT = -1  # microbatch of a task whose result is not used
WHOLE = ("gpipe", "1f1b", "interleaved")  # schedules whose backward passes compute all gradients
SCHEDULES = (*WHOLE, "zero-bubble")
IN_TICKS = "in_ticks_"  # prefix of the name of a computation that runs in some ticks only; a 0 or 1 per tick follows


class Task(NamedTuple):
    """One pass of one microbatch through one chunk, on `stage`; direction is one of DIRECTIONS."""

    stage: int
    chunk: int
    direction: int
    microbatch: int


Schedule = tuple[tuple[Task, ...], ...]


def warm_up(name: str, pipeline: int, stage: int, passes: int, per_stage: int, lockstep: bool = False) -> int:
    """Number of forward passes of a stage before its first backward pass.

    GPipe runs all forward passes first (Huang et al., 2019). 1F1B and its interleaved form (Narayanan et al., 2021,
    section 2.2) run as few as keep the later stages busy; zero-bubble runs as many as 1F1B. In lockstep, 1F1B runs as
    many as the interleaved form with one chunk per stage: with n later stages, a microbatch returns after 2 n ticks.
    """
    later = pipeline - stage - 1
    one = 2 * later if lockstep else later
    counts = {"gpipe": passes, "interleaved": 2 * later + (per_stage - 1) * pipeline}
    return min(passes, counts.get(name, one))


def lockstep_slots(name: str, pipeline: int, microbatches: int, per_stage: int) -> int:
    """Number of passes for whose saved values every stage allocates memory in lockstep.

    All stages run one program, so it is the number that the first stage needs. Passes whose results are not used write
    to slots that the schedule leaves free.
    """
    return warm_up(name, pipeline, 0, microbatches * per_stage, per_stage, lockstep=True) + 1


def deferred_slots(name: str, pipeline: int, microbatches: int) -> int:
    """Number of backward passes with deferred weight gradients for which every stage allocates memory in lockstep.

    It is the number that the last stage needs; 0 for all schedules but zero-bubble.
    """
    return 0 if name in WHOLE else min(microbatches + 1, pipeline)


@lru_cache(maxsize=256)
def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`; raises ValueError if it is unknown or cannot run these chunks or microbatches."""
    return _time_steps(_stage_orders(name, pipeline, microbatches, chunks), chunks)


@lru_cache(maxsize=256)
def ticks(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule in lockstep: in a step, every stage runs at most one pass of each direction, in their order.

    A pass reads the result of the neighboring stage from the previous step. All stages compute the weight gradients of
    a microbatch in the same step, after its backward pass on the first stage. Raises ValueError as `schedule` does.
    """
    return _time_steps(_stage_orders(name, pipeline, microbatches, chunks, lockstep=True), chunks, lockstep=True)


def with_waits(schedule: Schedule, pipeline: int) -> Schedule:
    """`schedule`, a result of `ticks`, with a task of microbatch WAIT for each pass whose result is not used."""
    steps = []
    for step in schedule:
        of = [[task for task in step if task.direction == direction] for direction in DIRECTIONS]
        for direction, tasks in enumerate(of):
            idle = set(range(pipeline)) - {task.stage for task in tasks} if tasks else ()
            tasks.extend(Task(stage, stage, direction, WAIT) for stage in sorted(idle))
        steps.append(tuple(itertools.chain(*of)))
    return tuple(steps)


def _stage_orders(name: str, pipeline: int, microbatches: int, chunks: int, lockstep: bool = False) -> list[list[Task]]:
    """The tasks of every stage in reverse order: the next task is last. Raises ValueError as `schedule` does."""
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
        orders.append((order if name in WHOLE else _with_weights(order, stage))[::-1])
    return orders


def _with_weights(order: list[Task], lag: int) -> list[Task]:
    """`order` with the weight gradients of every microbatch, `lag` backward passes after that of the microbatch."""
    found, waiting = [], []
    for task in order:
        found.append(task)
        if task.direction == BACKWARD:
            waiting.append(task._replace(direction=WEIGHTS))
            if len(waiting) > lag:
                found.append(waiting.pop(0))
    return found + waiting


def _time_steps(orders: list[list[Task]], chunks: int, lockstep: bool = False) -> Schedule:
    """The steps in which every stage runs its next task as soon as the tasks that it depends on are done."""
    done: set[tuple[int, int, int]] = set()

    def ready(task: Task) -> bool:
        _, chunk, direction, microbatch = task
        if direction == FORWARD:
            return not chunk or (chunk - 1, FORWARD, microbatch) in done
        if direction == WEIGHTS:
            return (0 if lockstep else chunk, BACKWARD, microbatch) in done
        last = chunk + 1 == chunks
        return (chunk, FORWARD, microbatch) in done and (last or (chunk + 1, BACKWARD, microbatch) in done)

    def of_direction(task: Task, direction: int) -> bool:
        return not lockstep or task.direction == direction

    steps = []
    while any(orders):
        step: list[Task] = []
        for direction in DIRECTIONS if lockstep else (FORWARD,):
            nexts = [order for order in orders if order and of_direction(order[-1], direction) and ready(order[-1])]
            made = [order.pop() for order in nexts]
            done.update(task[1:] for task in made)
            step += made
        assert step, "the stage orders wait for each other"
        steps.append(tuple(step))
    return tuple(steps)
