"""Every plan of the space, costed, within a time budget: the one ranking behind plan, mesh=auto, meshes=auto and tune=.

The space: data x tensor x pipeline degrees with product the number of devices; tensor by MeshSlice on rows x cols, by
Megatron or FSDP on a ring; every number of microbatches that divides the batch; every remat. A plan of one stage takes
the meshes that the torus carries (`Pod.meshes`), as train.py lays them out; a pipeline may split a torus axis. A plan
that shards the optimizer state over its replicas takes as long as the one that does not, and is tried where that does
not fit. The search is exhaustive, so that its winner is the best of the space by the cost model; where the budget ends
it early the result says so.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from mstrain.gemm import find_algorithm
from mstrain.models.parallel import ParallelConfig, layer_algorithms
from mstrain.models.transformer import REMAT
from mstrain.planner.clock import Clock, OutOfTime, divisors
from mstrain.planner.cost import Costed, Terms, cost_plan
from mstrain.planner.memory import MOMENT_BYTES, WEIGHT_BYTES, parameter_counts
from mstrain.planner.plan import PodPlan, plan_products
from mstrain.planner.request import PlanRequest

PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Rejected:
    """A plan that cannot be, and why; `costed` where it lacks nothing but memory."""

    plan: PodPlan
    reason: str
    costed: Costed | None = None


@dataclass
class PodResult:
    """What the search found.

    Attributes:
      ranked: the best plan of each name, fastest first; trainable: the fastest that train.py can run, or None.
      rejected: one per name of which no plan fits.
      costed: plans costed; finished: whether the whole space was searched, else the time budget ended it.
      seconds: of the search; summary: how far it came, in a sentence.
    """

    ranked: list[Costed] = field(default_factory=list)
    trainable: Costed | None = None
    rejected: list[Rejected] = field(default_factory=list)
    costed: int = 0
    finished: bool = True
    seconds: float = 0.0
    summary: str = ""

    @property
    def best(self) -> Costed:
        return self.ranked[0]


def layouts(request: PlanRequest) -> Iterator[PodPlan]:
    """Every plan but for its microbatches and remat, small pipelines first."""
    devices, fixed = request.pod.devices, request.fixed
    for pipeline in divisors(devices):
        if pipeline * fixed.chunks(pipeline) > request.model.layers or not fixed.allows("pipeline", pipeline):
            continue
        for data in divisors(devices // pipeline):
            tensor = devices // pipeline // data
            if request.batch % data or not (fixed.allows("data", data) and fixed.allows("tensor", tensor)):
                continue
            shapes = request.pod.meshes(data, pipeline)
            if fixed.shape:
                shapes = [fixed.shape] if math.prod(fixed.shape) == tensor else []
            for parallel in request.parallel[: 1 if tensor == 1 else None]:
                for rows, cols in _distinct(parallel, request.model.layers, shapes):
                    yield PodPlan(data, parallel, rows, cols, pipeline)


def _distinct(parallel: ParallelConfig, layers: int, shapes) -> list[tuple[int, int]]:
    """The shapes that differ for these algorithms: a ring of all devices has the squarest only."""
    names = {name for pair in layer_algorithms(parallel, layers) for name in pair}
    if shapes and all(find_algorithm(name).one_dimensional for name in names):
        return [min(shapes, key=lambda shape: (abs(math.log(shape[0] / shape[1])), shape))]
    return list(shapes)


def search(
    request: PlanRequest, clock: Clock | None = None, say: Callable[[str], None] = lambda line: None
) -> PodResult:
    """Costs every plan until the clock is over; calls `say` with progress. Raises ValueError without a vocabulary."""
    if request.model.vocab_size is None:
        raise ValueError(
            f"model {request.model.name} takes its vocabulary from the tokenizer. Type model.vocab_size=256."
        )
    result, clock, best = PodResult(), clock or Clock(), {}
    try:
        _cost_all(request, clock, result, best, say)
    except OutOfTime:
        result.finished = False
    result.ranked = sorted(best.values(), key=lambda c: (c.seconds, c.fullest.memory.total))
    result.trainable = next((costed for costed in result.ranked if not costed.plan.why_not_trainable()), None)
    result.seconds, result.summary = clock.seconds, clock.summary(result.costed, "plans evaluated", result.finished)
    return result


def _cost_all(
    request: PlanRequest, clock: Clock, result: PodResult, best: dict[str, Costed], say: Callable[[str], None]
) -> None:
    """The best plan of every layout goes to `best`, by name, or to the rejected ones. Raises OutOfTime."""
    reported, todo = 0.0, []
    for layout in layouts(request):
        todo.append(layout)
        clock.check()
    for number, layout in enumerate(todo):
        if clock.seconds - reported > PROGRESS_SECONDS:
            reported = clock.seconds
            say(f"{number} of {len(todo)} layouts, {result.costed} plans, {reported:.0f} of {clock.budget:g} s")
        for sharded in (False, True) if layout.data > 1 else (False,):
            fits, rejected = best_of_layout(request, replace(layout, sharded=sharded), clock, result)
            if fits:
                best[fits.plan.name] = fits
                break
            assert rejected is not None
            result.rejected.append(rejected)


def search_pod(
    request: PlanRequest, clock: Clock | None = None, say: Callable[[str], None] = lambda line: None
) -> PodResult:
    """As `search`; raises ValueError, with the nearest miss and the fix, when no plan fits."""
    clock = clock or Clock()
    result = search(request, clock, say)
    if not result.ranked:
        raise ValueError(_nothing_fits(request, result, clock.budget))
    return result


def rank_meshes(request: PlanRequest) -> list[Costed]:
    """The plans that train.py can run: those that fit fastest first, behind them those that lack memory.

    Where none fits as asked, the first is the mesh that is best with another remat or number of microbatches: the one
    that plan.py names. Raises ValueError, as the best one's plan does, when none is legal.
    """
    request = replace(request, fixed=replace(request.fixed, pipeline=1))
    result = search(request)
    tight = [item.costed for item in result.rejected if item.costed and not item.plan.sharded]
    found = [costed for costed in result.ranked if not costed.plan.why_not_trainable()]
    if tight and not found:
        open_choices = search(replace(request, fixed=replace(request.fixed, remat=None, microbatches=None)))
        fitting = [costed.shape for costed in open_choices.ranked if not costed.plan.why_not_trainable()]
        order = {shape: rank for rank, shape in enumerate(fitting)}
        tight.sort(key=lambda costed: (order.get(costed.shape, len(order)), costed.seconds))
    else:
        tight.sort(key=lambda costed: costed.seconds)
    if not found + tight:
        if not result.rejected:
            raise ValueError(_nothing_fits(request, result, math.inf))
        square = min(result.rejected, key=lambda r: (r.plan.data, abs(math.log(r.plan.rows / r.plan.cols))))
        raise ValueError(square.reason)
    return found + tight


def best_of_layout(
    request: PlanRequest, layout: PodPlan, clock: Clock, result: PodResult
) -> tuple[Costed | None, Rejected | None]:
    """(the fastest that fits over microbatches and remat, else the nearest miss); counts plans in the result.

    When time runs out, the best so far where there is one; else raises OutOfTime.
    """
    fixed, usable = request.fixed, request.usable_bytes
    best, tight, reason = None, None, ""
    for microbatches in divisors(request.batch // layout.data):
        if clock.over and best:
            result.finished = False
            break
        clock.check()
        if not fixed.allows("microbatches", microbatches):
            continue
        if fixed.chunks(layout.pipeline) > 1 and microbatches % layout.pipeline:
            reason = reason or f"schedule=interleaved needs microbatches in multiples of {layout.pipeline}"
            continue
        products = plan_products(request, replace(layout, microbatches=microbatches))
        if isinstance(products, str):
            reason = reason or products
            continue
        for remat in (fixed.remat,) if fixed.remat else REMAT:
            costed = cost_plan(request, replace(layout, microbatches=microbatches, remat=remat), products)
            result.costed += 1
            if costed.fits:
                best = min(best or costed, costed, key=lambda c: c.seconds)
            else:
                tight = min(tight or costed, costed, key=lambda c: c.fullest.memory.total)
        if tight and not best and least_state(request, layout) > usable:
            break  # no number of microbatches helps
    if tight:
        memory = tight.fullest.memory
        reason = f"{memory.total / 1e9:.1f} GB at best, most of it {memory.largest}; {usable / 1e9:.1f} GB usable"
    reason = reason or f"batch={request.batch} does not divide into {fixed.microbatches} microbatches"
    return best, None if best else Rejected(layout, reason, tight)


def least_state(request: PlanRequest, plan: PodPlan) -> float:
    """Bytes of state that some device of the plan holds at the least."""
    layers = -(-request.model.layers // plan.pipeline)
    moments = MOMENT_BYTES / (plan.data if plan.sharded else 1)
    return (2 * WEIGHT_BYTES + moments) * (layers - 1) * parameter_counts(request.model)[0] / plan.tensor


def why_slower(loser: Costed, best: Costed) -> str:
    """The term that grew most over the best plan's."""
    if loser is best:
        return "best"
    growth = {name: getattr(loser.terms, name) - getattr(best.terms, name) for name in Terms.__dataclass_fields__}
    term = max(growth, key=lambda name: growth[name])
    return f"{term.replace('_', ' ')} +{1e3 * growth[term]:.1f} ms"


def _nothing_fits(request: PlanRequest, result: PodResult, max_seconds: float) -> str:
    pod, fixed = request.pod, request.fixed
    if not result.finished:
        return f"no plan was found within {max_seconds:g} s. Type max_seconds={2 * max_seconds:g}."
    if not result.rejected:
        keys = {"replicas": fixed.data, "tensor": fixed.tensor, "pipeline": fixed.pipeline}
        what = " and ".join(f"{key}={value}" for key, value in keys.items() if value) or f"batch={request.batch}"
        return (
            f"no plan has {what} on the {pod.devices} devices of {pod.name}: the degrees multiply to "
            f"{pod.devices}, replicas divide batch={request.batch}, pipeline is at most {request.model.layers} "
            "layers. Type replicas=auto tensor=auto pipeline=auto."
        )
    full = [(r.costed.fullest.memory.total, r) for r in result.rejected if r.costed]
    shown = min(full, key=lambda pair: pair[0])[1] if full else result.rejected[0]
    return (
        f"no plan of {request.model.name} with batch={request.batch} fits {pod.name}. The nearest, "
        f"{shown.plan.name}: {shown.reason}. "
        "Type a larger cluster=, another batch=, or a smaller memory_margin=."
    )
