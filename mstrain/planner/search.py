"""Every plan of the space, costed, within a time budget.

The space: data x tensor x pipeline degrees with product the number of devices; tensor by MeshSlice on every
rows x cols, by Megatron or by FSDP; every number of microbatches that divides the batch; every remat. A plan
that shards the optimizer state over its replicas takes as long as the one that does not, and is tried where
that does not fit. The search is exhaustive, so that its winner is the best of the space by the cost model;
where the budget ends it early the result says so.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from mstrain.models.transformer import REMAT
from mstrain.planner.config import TENSOR, PodConfig
from mstrain.planner.cost import Costed, Terms, block_seconds, cost_plan
from mstrain.planner.memory import MOMENT_BYTES, WEIGHT_BYTES, parameter_counts
from mstrain.planner.plan import PodPlan, Products, plan_products
from mstrain.planner.target import Pod

PROGRESS_SECONDS = 5.0
SLICES = ("1", "2", "4", "8", "16")


@dataclass(frozen=True)
class Rejected:
    """A plan that cannot be, and why."""

    plan: PodPlan
    reason: str


@dataclass
class PodResult:
    """What the search found.

    Attributes:
      ranked: the best plan of each name, fastest first; trainable: the fastest that train.py can run, or
        None.
      rejected: one per name of which no plan fits.
      costed: plans costed; finished: whether the whole space was searched, else the time budget ended it.
      seconds: of the search.
    """

    ranked: list[Costed] = field(default_factory=list)
    trainable: Costed | None = None
    rejected: list[Rejected] = field(default_factory=list)
    costed: int = 0
    finished: bool = True
    seconds: float = 0.0

    @property
    def best(self) -> Costed:
        return self.ranked[0]


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def meshes(config: PodConfig, tensor: int) -> Iterator[tuple[str, int, int]]:
    """(algorithm, rows, cols) for `tensor` devices; a single device is MeshSlice on 1 x 1."""
    wanted = TENSOR if config.algorithm == "auto" else (config.algorithm,)
    if tensor == 1:
        yield wanted[0], 1, 1
        return
    for algorithm in wanted:
        if algorithm == "meshslice":
            yield from ((algorithm, rows, tensor // rows) for rows in divisors(tensor))
        else:
            rows = max(r for r in divisors(tensor) if r * r <= tensor)
            yield algorithm, rows, tensor // rows


def layouts(config: PodConfig, pod: Pod) -> Iterator[PodPlan]:
    """Every plan but for its microbatches and remat, small pipelines first."""
    for pipeline in divisors(pod.devices):
        if pipeline * config.chunks(pipeline) > config.model.layers or not config.allows(
            "pipeline", pipeline
        ):
            continue
        for data in divisors(pod.devices // pipeline):
            tensor = pod.devices // pipeline // data
            if config.batch % data or not (
                config.allows("replicas", data) and config.allows("tensor", tensor)
            ):
                continue
            for algorithm, rows, cols in meshes(config, tensor):
                yield PodPlan(data, algorithm, rows, cols, pipeline, 1, "none")


def search_pod(config: PodConfig, pod: Pod, say: Callable[[str], None] = lambda line: None) -> PodResult:
    """Costs every plan; calls `say` with a line of progress now and then.

    Raises ValueError, with the nearest miss and the fix, when no plan fits.
    """
    if config.model.vocab_size is None:
        raise ValueError(
            f"model {config.model.name} takes its vocabulary from the tokenizer. Type model.vocab_size=256."
        )
    result, best = PodResult(), {}
    began = told = time.monotonic()
    todo = list(layouts(config, pod))
    for number, layout in enumerate(todo):
        now = time.monotonic()
        if now - began > config.max_seconds:
            result.finished = False
            break
        if now - told > PROGRESS_SECONDS:
            told = now
            say(
                f"{number} of {len(todo)} layouts, {result.costed} plans, "
                f"{now - began:.0f} of {config.max_seconds:g} s"
            )
        for sharded in (False, True) if layout.data > 1 else (False,):
            plan = replace(layout, sharded=sharded)
            fits, reason, count = best_of_layout(config, pod, plan)
            result.costed += count
            if fits:
                best[plan.name] = fits
                break
            result.rejected.append(Rejected(plan, reason))
    result.ranked = sorted(best.values(), key=lambda c: (c.seconds, c.fullest.memory.total))
    trainable = [costed for costed in result.ranked if not costed.plan.why_not_trainable()]
    result.trainable = trainable[0] if trainable else None
    result.seconds = time.monotonic() - began
    if not result.ranked:
        raise ValueError(_nothing_fits(config, pod, result))
    return result


def usable_bytes(config: PodConfig, pod: Pod) -> float:
    return pod.memory_bytes * (1 - config.memory_margin)


def least_state(config: PodConfig, plan: PodPlan) -> float:
    """Bytes of state that some device of the plan holds at the least."""
    layers = -(-config.model.layers // plan.pipeline)
    moments = MOMENT_BYTES / (plan.data if plan.sharded else 1)
    return (2 * WEIGHT_BYTES + moments) * (layers - 1) * parameter_counts(config.model)[0] / plan.tensor


def fastest_slices(
    config: PodConfig, pod: Pod, layout: PodPlan, sequences: int
) -> tuple[str, Products | str]:
    """MeshSlice's slice count (auto, or one for all products) and the products under it; a string: why there
    are none.

    The tuner behind auto knows a rate of GEMMs, not that thin slices are fed by memory: there a fixed count
    may win.
    """
    sliced = layout.algorithm == "meshslice" and layout.tensor > 1
    made = {
        slices: plan_products(
            config.model,
            replace(layout, slices=slices, data=1, pipeline=1, sharded=False),
            sequences,
            config.seq,
            pod.chip,
            config.element_bytes,
        )
        for slices in (("auto", *SLICES) if sliced else ("auto",))
    }
    legal = [slices for slices, products in made.items() if not isinstance(products, str)]
    if not legal:
        return "auto", made["auto"]
    best = min(legal, key=lambda slices: block_seconds(config, pod, layout, made[slices]))
    return best, made[best]


def best_of_layout(config: PodConfig, pod: Pod, layout: PodPlan) -> tuple[Costed | None, str, int]:
    """(the fastest that fits, else None and the nearest reason, number costed) over microbatches and
    remat.
    """
    usable, best, count = usable_bytes(config, pod), None, 0
    if least_state(config, layout) > usable:
        return (
            None,
            f"{least_state(config, layout) / 1e9:.1f} GB of state alone, {usable / 1e9:.1f} GB usable",
            0,
        )
    nearest, reason = float("inf"), ""
    for microbatches in divisors(config.batch // layout.data):
        sequences = config.batch // layout.data // microbatches
        if config.chunks(layout.pipeline) > 1 and microbatches % layout.pipeline:
            reason = reason or f"schedule=interleaved needs microbatches in multiples of {layout.pipeline}"
            continue
        slices, products = fastest_slices(config, pod, layout, sequences)
        if isinstance(products, str):
            reason = reason or products
            continue
        for remat in REMAT if config.remat == "auto" else (config.remat,):
            plan = replace(layout, microbatches=microbatches, remat=remat, slices=slices)
            costed = cost_plan(config, pod, plan, products)
            count += 1
            memory = costed.fullest.memory
            if memory.total > usable:
                if memory.total < nearest:
                    nearest, reason = (
                        memory.total,
                        (
                            f"{memory.total / 1e9:.1f} GB at best, most of it {memory.largest}; "
                            f"{usable / 1e9:.1f} GB usable"
                        ),
                    )
            elif best is None or costed.seconds < best.seconds:
                best = costed
    return best, reason, count


def why_slower(loser: Costed, best: Costed) -> str:
    """The term that grew most over the best plan's."""
    if loser is best:
        return "best"
    growth = {
        name: getattr(loser.terms, name) - getattr(best.terms, name) for name in Terms.__dataclass_fields__
    }
    term = max(growth, key=growth.get)
    return f"{term.replace('_', ' ')} +{1e3 * growth[term]:.1f} ms"


def _nothing_fits(config: PodConfig, pod: Pod, result: PodResult) -> str:
    if not result.finished:
        return (
            f"no plan was found within {config.max_seconds:g} s. Type max_seconds={2 * config.max_seconds:g}."
        )
    if not result.rejected:
        fixed = [
            f"{key}={getattr(config, key)}"
            for key in ("replicas", "tensor", "pipeline")
            if getattr(config, key) != "auto"
        ]
        what = " and ".join(fixed) or f"batch={config.batch}"
        return (
            f"no plan has {what} on the {pod.devices} devices of {pod.name}: the degrees multiply to "
            f"{pod.devices}, replicas divide batch={config.batch}, pipeline is at most {config.model.layers} "
            "layers. Type replicas=auto tensor=auto pipeline=auto."
        )
    fullest = [r for r in result.rejected if r.reason.endswith("usable")]
    shown = min(fullest, key=lambda r: float(r.reason.split()[0])) if fullest else result.rejected[0]
    return (
        f"no plan of {config.model.name} with batch={config.batch} fits {pod.name}. The nearest, "
        f"{shown.plan.name}: {shown.reason}. "
        "Type a larger cluster=, another batch=, or a smaller memory_margin=."
    )
