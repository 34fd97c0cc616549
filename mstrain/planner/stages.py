"""The stages of a planned pipeline: their layers, and the microbatches that each holds."""

from mstrain.parallel.schedules import WHOLE, deferred_slots, lockstep_slots, warm_up
from mstrain.planner.plan import PodPlan


def split_layers(layers: int, pipeline: int, head: float) -> list[tuple[int, int]]:
    """Layers [begin, end) per stage; fewer for the last, whose output projection takes `head` layers' time.

    The other stages share evenly, the first ones taking one more; of all such splits one with the least
    maximum.
    """
    if pipeline == 1:
        return [(0, layers)]
    others = pipeline - 1
    fewest = min(
        range(1, layers - others + 1), key=lambda last: (max(-(-(layers - last) // others), last + head), -last)
    )
    small, extra = divmod(layers - fewest, others)
    bounds = [0]
    for stage in range(others):
        bounds.append(bounds[-1] + small + (stage < extra))
    return list(zip(bounds, [*bounds[1:], layers]))


def microbatches_in_flight(plan: PodPlan, stage: int, lockstep: bool) -> float:
    """Microbatches that `stage` holds between their passes, at most, by itself or in `lockstep` with the others."""
    passes, name = plan.microbatches * plan.chunks, plan.schedule
    if lockstep and plan.pipeline > 1:
        return lockstep_slots(name, plan.pipeline, plan.microbatches, plan.chunks) / plan.chunks
    deferred = microbatches_deferred(plan, stage, lockstep) - 1 if name == "zero-bubble" else 0
    name = name if name == "gpipe" or plan.chunks > 1 else "1f1b"
    return min(passes, warm_up(name, plan.pipeline, stage, passes, plan.chunks) + 1 + deferred) / plan.chunks


def microbatches_deferred(plan: PodPlan, stage: int, lockstep: bool) -> int:
    """Microbatches of which `stage` holds what the gradients of weights need, at most, when they are made later."""
    if plan.schedule in WHOLE or plan.pipeline == 1:
        return 0
    if lockstep:
        return deferred_slots(plan.schedule, plan.pipeline, plan.microbatches)
    return min(plan.microbatches, stage + 1)
