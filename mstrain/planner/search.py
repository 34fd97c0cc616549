"""Exhaustive search for the fastest plan within a time budget, for plan.py, mesh=auto, meshes=auto and tune=.

The space has all data x context x tensor x pipeline degrees whose product is the number of devices; tensor parallelism
by MeshSlice on rows x cols, or by Megatron or FSDP on a ring; every number of microbatches that divides the batch; and
every remat, shard and schedule. A plan with one stage uses the meshes whose links are known (`Pod.meshes`), placed as
by train.py; a pipeline may split a torus axis. The result is the best plan of the space by the cost model: a plan is
skipped only if its microbatches alone take longer than a whole step that fits, or if its state alone does not fit.
`PodResult.finished` is False if the time budget ends the search early. With a time budget, the search therefore starts
with the layouts whose layers take the least time.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from mstrain.display.tables import decimal, most_grown
from mstrain.gemm import find_algorithm
from mstrain.models.parallel import ParallelConfig, layer_algorithms
from mstrain.models.remat import LADDER
from mstrain.planner.clock import Clock, OutOfTime, divisors
from mstrain.planner.cost import Costed, Step, Terms
from mstrain.planner.layer import Work, layer_works
from mstrain.planner.memory import stage_parameters, state_bytes
from mstrain.planner.plan import PodPlan, Products, plan_products, why_not_divided
from mstrain.planner.request import SCHEDULES, SHARDS, PlanRequest
from mstrain.planner.trainer import why_not_trainable

PROGRESS_SECONDS = 5.0  # between lines of progress
SHORTEST_PART = 1024  # tokens per device of a sequence that is split over devices
REMATS = (*LADDER, "attention-in", "minimal_offloaded")
CHUNKS = (2, 4)  # per stage of an interleaved schedule
ORDER_PART = 0.4  # fraction of a time budget for sorting the layouts
PASSES = 4  # microbatches per stage after the first that are assumed when sorting layouts


@dataclass(frozen=True)
class Rejected:
    """A plan that is illegal or does not fit, with the reason; `costed` is None if it is illegal."""

    plan: PodPlan
    reason: str
    costed: Costed | None = None


@dataclass
class PodResult:
    """The result of a search.

    Attributes:
      ranked: the best plan of each `PodPlan.name`, fastest first.
      trainable: the same, of the plans that train.py can run.
      rejected: one rejected plan for each name without a plan that fits.
      costed: number of plans evaluated.
      finished: whether the whole space was searched; False if the time budget ended the search.
      seconds: duration of the search.
      summary: a sentence that reports the number of plans and the duration.
    """

    ranked: list[Costed] = field(default_factory=list)
    trainable: list[Costed] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    costed: int = 0
    finished: bool = True
    seconds: float = 0.0
    summary: str = ""

    @property
    def best(self) -> Costed:
        return self.ranked[0]


def layouts(request: PlanRequest) -> Iterator[PodPlan]:
    """All layouts: plans without a choice of microbatches, remat, shard and schedule; small pipelines first."""
    devices, fixed = request.pod.devices, request.fixed
    in_rings = sorted(request.parallel, key=lambda parallel: not _in_rings(parallel, request.model.layers))
    for pipeline in divisors(devices):
        if pipeline > request.layer_groups[-1][1] or not fixed.allows("pipeline", pipeline):
            continue
        for data in divisors(devices // pipeline):
            if request.batch % data or not fixed.allows("data", data) or (fixed.staged and pipeline == 1):
                continue
            alone = fixed.shard in SHARDS[1:]  # sharding over one device has no effect
            for context in _contexts(request, devices // pipeline // data):
                tensor = devices // pipeline // data // context
                if not fixed.allows("tensor", tensor) or (alone and data * context == 1):
                    continue
                shapes = request.pod.meshes(data * context, pipeline)
                if fixed.shape:
                    shapes = [fixed.shape] if math.prod(fixed.shape) == tensor else []
                for parallel in request.parallel[:1] if tensor == 1 else in_rings:
                    for rows, cols in _distinct(parallel, request.model.layers, shapes):
                        for expert in _experts(request, data):
                            yield PodPlan(data, parallel, rows, cols, pipeline, context=context, expert=expert)


def _contexts(request: PlanRequest, devices: int) -> list[int]:
    """The context degrees to search: numbers of parts into which each sequence is split."""
    if request.fixed.context:
        return [request.fixed.context] if devices % request.fixed.context == 0 else []
    most = max(1, request.seq // SHORTEST_PART)
    return [count for count in divisors(devices) if count <= most and request.seq % count == 0]


def _experts(request: PlanRequest, data: int) -> list[int]:
    """The expert degrees to search; experts are sharded over replicas of one TPU slice."""
    inside, fixed = data // math.gcd(data, request.pod.slices), request.fixed
    most = math.gcd(inside, request.model.experts or 1) if request.style.native else 1
    return [count for count in divisors(most) if fixed.allows("expert", count)]


def _in_rings(parallel: ParallelConfig, layers: int) -> bool:
    """Whether all products use a ring of all tensor-parallel devices, whatever the rows and columns.

    Among plans with equal times such a plan comes first: MeshSlice and Collective on a mesh of rows only may compile to
    the same program.
    """
    return all(find_algorithm(name).one_dimensional for pair in layer_algorithms(parallel, layers) for name in pair)


def _distinct(parallel: ParallelConfig, layers: int, shapes) -> list[tuple[int, int]]:
    """The `shapes` that are distinct plans for these algorithms; for a ring, the one closest to a square."""
    if shapes and _in_rings(parallel, layers):
        return [min(shapes, key=lambda shape: (abs(math.log(shape[0] / shape[1])), shape))]
    return list(shapes)


def search(
    request: PlanRequest, clock: Clock | None = None, say: Callable[[str], None] = lambda line: None,
    best_only: bool = False,
) -> PodResult:  # fmt: skip
    """Evaluates all plans until the time budget is spent; calls `say` with lines of progress.

    With `best_only`, plans that cannot be faster than a plan of train.py that fits are skipped, whatever their name.
    Raises ValueError for a model without a vocabulary size.
    """
    if request.model.vocab_size is None:
        raise ValueError(
            f"model {request.model.name} takes its vocabulary from the tokenizer. Type model.vocab_size=256."
        )
    clock = clock or Clock()
    every = _Search(request, clock, best_only)
    result, reported, todo = every.result, 0.0, []
    try:
        for layout in layouts(request):
            todo.append(layout)
            clock.check()
        for number, layout in enumerate(every.in_order(todo)):
            if clock.seconds - reported > PROGRESS_SECONDS:
                reported = clock.seconds
                say(f"{number} of {len(todo)} layouts, {result.costed} plans, {reported:.0f} of {clock.budget:g} s")
            every.layout(layout)
    except OutOfTime:
        result.finished = False
    result.ranked, result.trainable = (
        sorted(
            found.values(),
            key=lambda c: (c.seconds, c.fullest.total, not _in_rings(c.plan.parallel, request.model.layers)),
        )
        for found in (every.best, every.trainable)
    )
    result.seconds = clock.seconds
    result.summary = clock.summary(result.costed, "plans evaluated", result.finished)
    return result


class _Search:
    """The state of a search: the best plan of every name so far, of all plans and of those that train.py can run."""

    def __init__(self, request: PlanRequest, clock: Clock, best_only: bool):
        self.request, self.clock, self.best_only, self.result = request, clock, best_only, PodResult()
        self.best: dict[str, Costed] = {}
        self.trainable: dict[str, Costed] = {}

    def in_order(self, layouts: list[PodPlan]) -> list[PodPlan]:
        """`layouts` in the order of a search with a time budget: those whose layers take the least time first.

        If sorting spends ORDER_PART of the budget, the remaining layouts follow in random order, so that a search that
        stops early has seen all degrees.
        """
        if math.isinf(self.clock.budget):
            return layouts
        mixed = random.Random(0).sample(range(len(layouts)), len(layouts))
        seconds: dict[int, float] = {}
        for number in mixed:
            if self.clock.seconds > ORDER_PART * self.clock.budget:
                break
            seconds[number] = self._outlook(layouts[number])
        first = sorted(seconds, key=lambda number: (seconds[number], number))
        return [layouts[number] for number in (*first, *(number for number in mixed if number not in seconds))]

    def _microbatches(self, layout: PodPlan) -> list[int]:
        """The numbers of microbatches that a layout may have, in ascending order."""
        return [n for n in divisors(self.request.batch // layout.data) if self.request.fixed.allows("microbatches", n)]

    def _outlook(self, layout: PodPlan) -> float:
        """Lower bound of the step's seconds with a typical number of microbatches; infinite for an illegal layout."""
        counts = self._microbatches(layout)
        if not counts:
            return math.inf
        few = next((count for count in counts if count >= PASSES * (layout.pipeline - 1)), counts[-1])
        plan = replace(layout, microbatches=few)
        products = plan_products(self.request, plan)
        return math.inf if isinstance(products, str) else self._least(plan, layer_works(self.request, plan, products))

    def layout(self, layout: PodPlan) -> None:
        """Evaluates a layout with every number of microbatches, remat, schedule and shard. Raises OutOfTime."""
        request, fixed, name = self.request, self.request.fixed, layout.name
        tight, reason, refusal = None, "", ""
        if self.best_only and self.trainable and self._least_state(layout) > request.usable_bytes:
            return
        for microbatches in self._microbatches(layout):
            self.clock.check()
            plan = replace(layout, microbatches=microbatches)
            products = plan_products(request, plan)
            if isinstance(products, str):
                if products == refusal:
                    break  # the reason does not depend on the number of microbatches
                reason, refusal = reason or products, products
                continue
            works, choices = layer_works(request, plan, products), list(self._choices(plan))
            if self.best_only and self._least(plan, works) >= self._slowest(self.trainable, name):
                continue
            steps = (Step(request, choice, products, works) for choice in choices)
            if least := self._too_large(plan, choices, products, works):
                self.result.costed += len(choices) * len(self._shards(plan))
                tight = min(tight or least, least, key=lambda c: c.fullest.total)
                steps = ()
            for step in steps:
                self.clock.check()
                tight = self._cost(step, name, tight)
            if tight and name not in self.best and self._least_state(layout) > request.usable_bytes:
                break  # the state does not fit, whatever the number of microbatches
        if name in self.best or self.best_only and self.best:
            return
        if tight:
            memory, usable = tight.fullest, request.usable_bytes
            reason = f"{memory.total / 1e9:.1f} GB at best, most of it {memory.largest}; {usable / 1e9:.1f} GB usable"
        elif not reason:
            reason = f"batch={request.batch} does not divide into {fixed.microbatches} microbatches"
            if fixed.schedule == "interleaved":
                reason = (
                    f"schedule=interleaved needs microbatches in multiples of {layout.pipeline}, and as many layers"
                )
        self.result.rejected.append(Rejected(layout, reason, tight))

    def _least(self, plan: PodPlan, works: tuple[Work, ...]) -> float:
        """Lower bound of the step's seconds: layers, and the smallest bubble of all schedules that are searched."""
        whole = self.request.fixed.schedule in ("1f1b", "gpipe")
        bubble = (plan.pipeline - 1) / (1 if whole else self.request.fixed.interleave or max(CHUNKS))
        kinds = zip(works, self.request.layer_groups)
        layers = sum(count * (work.forward + work.backward).seconds for work, (_, count) in kinds)
        return (plan.microbatches + bubble) * layers / plan.pipeline

    def _slowest(self, found: dict[str, Costed], name: str) -> float:
        """Seconds from which a step need not be evaluated, because a better plan is in `found`."""
        if self.best_only:
            return min((costed.seconds for costed in found.values()), default=math.inf)
        return found[name].seconds if name in found else math.inf

    def _shards(self, plan: PodPlan) -> tuple[str, ...]:
        fixed = self.request.fixed.shard
        return (fixed,) if fixed else SHARDS if plan.replicas > 1 else SHARDS[:1]

    def _too_large(
        self, plan: PodPlan, choices: list[PodPlan], products: Products, works: tuple[Work, ...]
    ) -> Costed | None:
        """The choice that needs the least memory, if it does not fit, else None; its remat is `full` or `none`."""
        shard, ends = self._shards(plan)[-1], {"none", "full", self.request.fixed.remat}
        least = [choice for choice in choices if choice.schedule == choices[0].schedule and choice.remat in ends]
        every = [Step(self.request, each, products, works).cost(replace(each, shard=shard)) for each in least]
        smallest = min(every, key=lambda costed: costed.fullest.total, default=None)
        return None if smallest is None or smallest.fits else smallest

    def _cost(self, step: Step, name: str, tight: Costed | None) -> Costed | None:
        """Evaluates a step with every shard; returns the plan with the least memory among those that do not fit."""
        for shard in self._shards(step.plan):
            self.result.costed += 1
            plan = step.plan if shard == step.plan.shard else replace(step.plan, shard=shard)
            mine = [self.best] if why_not_trainable(plan, self.request.pod.slices) else [self.best, self.trainable]
            if all(self._slowest(found, name) <= step.scheduled for found in mine):
                continue
            costed = step.cost(plan)
            if not costed.fits:
                tight = costed if tight is None or costed.fullest.total < tight.fullest.total else tight
                continue
            for found in mine:
                if name not in found or costed.seconds < found[name].seconds:
                    found[name] = costed
        return tight

    def _choices(self, plan: PodPlan) -> Iterator[PodPlan]:
        """The plan with every remat and schedule; remats that recompute least come first."""
        fixed, stages = self.request.fixed, plan.pipeline
        schedules = SCHEDULES[:1] if stages == 1 else [fixed.schedule] if fixed.schedule else SCHEDULES
        for remat, schedule in itertools.product([fixed.remat] if fixed.remat else REMATS, schedules):
            if schedule != "interleaved":
                yield replace(plan, remat=remat, schedule=schedule)
                continue
            for chunks in [fixed.interleave] if fixed.interleave else CHUNKS:
                choice = replace(plan, remat=remat, schedule=schedule, interleave=chunks)
                divided = plan.microbatches % stages == 0 and stages * chunks <= self.request.layer_groups[-1][1]
                if divided and not why_not_divided(self.request, choice):
                    yield choice

    def _least_state(self, layout: PodPlan) -> float:
        """Lower bound of the bytes of state on the device that has most."""
        shard = self.request.fixed.shard or (SHARDS[-1] if layout.replicas > 1 else SHARDS[0])
        *first, (_, others) = self.request.layer_groups
        layers = -(-others // layout.pipeline) - 1
        parameters = stage_parameters(self.request.model, (*[0] * len(first), layers), False, False).over(layout.tensor)
        return sum(state_bytes(self.request, replace(layout, shard=shard), parameters))


def search_pod(
    request: PlanRequest, clock: Clock | None = None, say: Callable[[str], None] = lambda line: None,
    best_only: bool = False, train: bool = False,
) -> PodResult:  # fmt: skip
    """As `search`, but raises ValueError if no plan fits, with the plan that is closest to fitting and the fix.

    The fix has keys of plan.py, or those of train.py with `train`.
    """
    clock = clock or Clock()
    result = search(request, clock, say, best_only)
    if not result.ranked:
        raise ValueError(_nothing_fits(request, result, clock.budget, train))
    return result


def rank_meshes(request: PlanRequest, best_only: bool = False) -> list[Costed]:
    """The plans that train.py can run: those that fit, fastest first, then those that do not fit.

    The plans differ in their meshes; a schedule or shard that is not fixed has the default of train.py. If no plan fits
    with the fixed choices, the first plan has the mesh that is best with another remat or number of microbatches, which
    plan.py reports. With `best_only`, the ranking is exact for the first plan only. Raises ValueError if no plan is
    legal, with the reason for the mesh that is closest to a square.
    """
    shard, schedule = request.fixed.shard or "none", request.fixed.schedule or SCHEDULES[0]
    fixed = replace(request.fixed, shard=shard, schedule=schedule)
    request = replace(request, fixed=fixed)
    result = search(request, best_only=best_only)
    tight = [item.costed for item in result.rejected if item.costed and not item.costed.why_not_trainable]
    found = result.trainable
    if tight and not found:
        fixed = replace(fixed, remat=None, microbatches=None)
        open_choices = search(replace(request, fixed=fixed), best_only=best_only)
        order = {costed.shape: rank for rank, costed in enumerate(open_choices.trainable)}
        tight.sort(key=lambda costed: (order.get(costed.shape, len(order)), costed.seconds))
    else:
        tight.sort(key=lambda costed: costed.seconds)
    if not found + tight:
        if not result.rejected:
            raise ValueError(_nothing_fits(request, result, math.inf, train=True))
        plans = [(r.plan.pipeline, r.plan.data, abs(math.log(r.plan.rows / r.plan.cols))) for r in result.rejected]
        square = result.rejected[plans.index(min(plans))]
        raise ValueError(square.reason)
    return found + tight


def why_slower(loser: Costed, best: Costed) -> str:
    """The term that exceeds that of the best plan most, and by how much."""
    if loser is best:
        return "best"
    term, seconds = most_grown(Terms.__dataclass_fields__, loser.terms, best.terms)
    return f"{term.replace('_', ' ')} +{decimal(1e3 * seconds, 1e3 * best.seconds)} ms"


def _nothing_fits(request: PlanRequest, result: PodResult, max_seconds: float, train: bool) -> str:
    pod, fixed = request.pod, request.fixed
    if not result.finished:
        return f"no plan was found in {max_seconds:g} s of search. Type max_seconds={4 * max_seconds:g}."
    if not result.rejected:
        keys = {"replicas": fixed.data}
        keys |= {name: getattr(fixed, name) for name in ("tensor", "context", "pipeline", "expert")}
        shard = ""
        if fixed.shard in SHARDS[1:]:
            keys, shard = keys | {"shard": fixed.shard}, f"shard={fixed.shard} needs replicas or context of 2 or more, "
        what = " and ".join(f"{key}={value}" for key, value in keys.items() if value) or f"batch={request.batch}"
        what, torus = f"several stages and {what}" if fixed.staged else what, ""
        fix = "another mesh= or batch=, or remove keys of pipeline. and shard="
        if pod.tpu_slice and fixed.pipeline in (None, 1):
            chips = "x".join(map(str, pod.tpu_slice.topology))
            torus = f"rows and columns of a plan of one stage are whole axes of {chips} chips or each a part of one, "
        return (
            f"no plan has {what} on the {pod.devices} devices of {pod.name}: the degrees multiply to "
            f"{pod.devices}, {torus}{shard}replicas divide batch={request.batch}, expert divides replicas, pipeline is "
            f"at most {request.layer_groups[-1][1]} layers. Type "
            f"{fix if train else ' '.join(f'{key}=auto' for key in keys)}."
        )
    full = [(r.costed.fullest.total, r) for r in result.rejected if r.costed]
    shown = min(full, key=lambda pair: pair[0])[1] if full else result.rejected[0]
    only_margin = shown.costed and shown.costed.fullest.total <= pod.memory_bytes
    fix = f"Type a larger cluster=, or another batch={', or a smaller memory_margin=' if only_margin else ''}"
    if train:
        fix = "Use more devices (with check=true, a larger target=), or type another batch= or model="
    return (
        f"no plan of {request.model.name} with batch={request.batch} fits {pod.name}. The nearest, "
        f"{shown.plan.name}: {shown.reason}. {fix}."
    )
