"""Pipeline schedules: which stage runs which microbatch, in which order.

A schedule is a list of time steps; a step is the tasks that different stages run side by side. The steps only
fix an order: how long anything takes is the simulator's business. Chunks are consecutive parts of the model;
with `pipeline` stages, chunk c runs on stage c mod `pipeline` (more chunks than stages: interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD = 0, 1


class Task(NamedTuple):
    """One pass of one microbatch through one chunk, on `stage`; direction is FORWARD or BACKWARD."""

    stage: int
    chunk: int
    direction: int
    microbatch: int


Schedule = tuple[tuple[Task, ...], ...]


def _needs(chunk: int, direction: int, microbatch: int, num_chunks: int) -> list[tuple[int, int, int]]:
    """The (chunk, direction, microbatch) passes that must come in an earlier step."""
    if direction == FORWARD:
        return [(chunk - 1, FORWARD, microbatch)] if chunk else []
    needs = [(chunk, FORWARD, microbatch)]
    return needs + [(chunk + 1, BACKWARD, microbatch)] if chunk + 1 < num_chunks else needs


def _steps_from_orders(orders: Sequence[Sequence[Task]], num_chunks: int) -> Schedule:
    """Time steps in which every stage works through its own order as soon as what it needs is done."""
    position = [0] * len(orders)
    done: set[tuple[int, int, int]] = set()
    steps = []
    while any(at < len(order) for at, order in zip(position, orders)):
        step = [
            order[at]
            for at, order in zip(position, orders)
            if at < len(order) and all(need in done for need in _needs(*order[at][1:], num_chunks))
        ]
        assert step, "the stage orders wait for each other"
        for task in step:
            position[task.stage] += 1
            done.add(task[1:])
        steps.append(tuple(step))
    return tuple(steps)


def gpipe(pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019): every microbatch is in flight on every stage."""
    orders = [
        [Task(stage, stage, direction, m) for direction in (FORWARD, BACKWARD) for m in range(microbatches)]
        for stage in range(pipeline)
    ]
    return _steps_from_orders(orders, chunks)


def one_f_one_b(pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """Textbook 1F1B (Narayanan et al., 2021): stage s holds min(microbatches, pipeline - s) in flight."""
    orders = []
    for stage in range(pipeline):
        warm_up = min(pipeline - stage - 1, microbatches)
        order = [Task(stage, stage, FORWARD, m) for m in range(warm_up)]
        for m in range(warm_up, microbatches):
            order += [Task(stage, stage, FORWARD, m), Task(stage, stage, BACKWARD, m - warm_up)]
        order += [Task(stage, stage, BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
        orders.append(order)
    return _steps_from_orders(orders, chunks)


def interleaved(pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021, section 2.2): `chunks / pipeline` chunks per stage.

    Raises ValueError unless chunks and microbatches are multiples of the pipeline degree.
    """
    if chunks % pipeline or microbatches % pipeline:
        raise ValueError(
            f"schedule interleaved needs chunks ({chunks}) and microbatches ({microbatches}) that are "
            f"multiples of the pipeline degree ({pipeline}); change them or use schedule=1f1b"
        )
    per_stage, total = chunks // pipeline, microbatches * (chunks // pipeline)

    def passes(stage: int, direction: int) -> list[Task]:
        order = []
        for index in range(total):
            group, within = divmod(index, pipeline * per_stage)
            which = within // pipeline
            which = which if direction == FORWARD else per_stage - 1 - which
            order.append(Task(stage, which * pipeline + stage, direction, group * pipeline + within % pipeline))
        return order

    orders = []
    for stage in range(pipeline):
        warm_up = min(2 * (pipeline - stage - 1) + (per_stage - 1) * pipeline, total)
        forwards, backwards = passes(stage, FORWARD), passes(stage, BACKWARD)
        order = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards):
            order += [forward, backward]
        orders.append(order + backwards[total - warm_up :])
    return _steps_from_orders(orders, chunks)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


@lru_cache(maxsize=256)
def schedule(name: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule called `name`. Raises ValueError for an unknown name or more chunks than it can use."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {' '.join(SCHEDULES)}")
    if chunks != pipeline and name != "interleaved":
        raise ValueError(
            f"schedule {name} runs one chunk per stage, not {chunks} chunks on {pipeline} stages; "
            "use schedule=interleaved"
        )
    return SCHEDULES[name](pipeline, microbatches, chunks)
