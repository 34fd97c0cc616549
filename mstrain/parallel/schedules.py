"""Pipeline schedules: which stage runs which microbatch, in which order.

A schedule is a list of time steps; a step is the tasks that different stages run side by side. The steps fix an order;
the simulator computes the times. Chunks are consecutive parts of the model; with `pipeline` stages, chunk c runs on
stage c mod `pipeline` (more chunks than stages: interleaved).

In schedule zero-bubble, a backward pass (BACKWARD) makes the gradients of activations only, for which the stage before
waits. The products that make the gradients of weights (WEIGHTS) run later, where a stage would wait: the schedule is
ZB-H1 of Qi et al., 2024, which holds as many microbatches as 1F1B's first stage. Its bubble is p - 1 times
F + B - W on each of p stages, that of 1F1B (p - 1) (F + B + W).

The program that train.py compiles runs all stages in lockstep (`ticks`): in a tick, every stage runs at most one pass
of each direction, in their order. With equal stages the bubble is that of the schedule without lockstep: p - 1 forward
and backward passes of a chunk on each of p stages; with zero-bubble it is (p - 1) (F + B), because no stage can run the
products of weights while another runs a pass.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = DIRECTIONS = 0, 1, 2
WAIT = -1
WHOLE = ("gpipe", "1f1b", "interleaved")  # their backward passes make all gradients
SCHEDULES = (*WHOLE, "zero-bubble")
IN_TICKS = "in_ticks_"  # name of what only some ticks of a loop compute, before a 0 or 1 for every tick


class Task(NamedTuple):
    """One pass of one microbatch through one chunk, on `stage`; direction is one of DIRECTIONS."""

    stage: int
    chunk: int
    direction: int
    microbatch: int


Schedule = tuple[tuple[Task, ...], ...]


def warm_up(name: str, pipeline: int, stage: int, passes: int, per_stage: int, lockstep: bool = False) -> int:
    """Forward passes of a stage before its first backward pass.

    GPipe runs all (Huang et al., 2019); 1F1B and its interleaved form (Narayanan et al., 2021, section 2.2) as few as
    keep the later stages busy, and zero-bubble as many as 1F1B. In lockstep, 1F1B needs as many as the interleaved form
    with one chunk per stage: a microbatch returns after 2 x later ticks.
    """
    later = pipeline - stage - 1
    one = 2 * later if lockstep else later
    counts = {"gpipe": passes, "interleaved": 2 * later + (per_stage - 1) * pipeline}
    return min(passes, counts.get(name, one))


def lockstep_slots(name: str, pipeline: int, microbatches: int, per_stage: int) -> int:
    """Passes whose saved values every stage has memory for in lockstep: stages run one program, and the first holds
    most. A slot that the schedule leaves free is for passes that do not count.
    """
    return warm_up(name, pipeline, 0, microbatches * per_stage, per_stage, lockstep=True) + 1


def deferred_slots(name: str, pipeline: int, microbatches: int) -> int:
    """Backward passes whose weight gradients every stage has memory to make later, in lockstep: the last stage holds
    most. None but with zero-bubble.
    """
    return 0 if name in WHOLE else min(microbatches + 1, pipeline)


@lru_cache(maxsize=256)
def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`. Raises ValueError for an unknown name, or chunks or microbatches it cannot use."""
    return _time_steps(_stage_orders(name, pipeline, microbatches, chunks), chunks)


@lru_cache(maxsize=256)
def ticks(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The same in lockstep: a step has at most one pass of each direction of every stage, in their order.

    A pass reads what the neighbor stage made in the step before. All stages make the weight gradients of a microbatch
    in one step, when it has left the first stage. Raises ValueError as `schedule`.
    """
    return _time_steps(_stage_orders(name, pipeline, microbatches, chunks, lockstep=True), chunks, lockstep=True)


def with_waits(schedule: Schedule, pipeline: int) -> Schedule:
    """`schedule`, one of `ticks`, with a task of microbatch WAIT for every stage that computes what does not count."""
    steps = []
    for step in schedule:
        of = [[task for task in step if task.direction == direction] for direction in DIRECTIONS]
        for direction, tasks in enumerate(of):
            idle = set(range(pipeline)) - {task.stage for task in tasks} if tasks else ()
            tasks.extend(Task(stage, stage, direction, WAIT) for stage in sorted(idle))
        steps.append(tuple(itertools.chain(*of)))
    return tuple(steps)


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
        orders.append((order if name in WHOLE else _with_weights(order, stage))[::-1])
    return orders


def _with_weights(order: list[Task], lag: int) -> list[Task]:
    """`order` with the weight gradients of every microbatch, `lag` backward passes after its own (ZB-H1)."""
    found, waiting = [], []
    for task in order:
        found.append(task)
        if task.direction == BACKWARD:
            waiting.append(task._replace(direction=WEIGHTS))
            if len(waiting) > lag:
                found.append(waiting.pop(0))
    return found + waiting


def _time_steps(orders: list[list[Task]], chunks: int, lockstep: bool = False) -> Schedule:
    """Steps in which every stage runs its next task as soon as what the task needs is done."""
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
