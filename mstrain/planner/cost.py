"""What one plan takes: seconds of a step by term, memory of its fullest stage.

    step = (M - 1) * cycle + sum of stages + 2 (P - 1) messages + gradient sums + update

for M microbatches and P stages; a stage takes the forward and the backward pass of one microbatch. The cycle
of 1F1B is the slowest stage, or a round trip through the stages behind stage s shared by the P - s
microbatches in flight there; that of GPipe the slowest forward plus the slowest backward. Interleaved stages
fill and drain in as many times less as they have chunks. Nothing of the
gradient sums is hidden. train.py sums gradients over the replicas once per microbatch; pipelines, which it
does not have, are charged for one sum.
"""

from dataclasses import asdict, dataclass

from mstrain.hardware import Link, collective_seconds
from mstrain.hardware.constants import Constants
from mstrain.mesh import MeshShape
from mstrain.planner.layer import Pass, Work, layer_work
from mstrain.planner.memory import WEIGHT_BYTES, Memory, parameter_counts, stage_memory
from mstrain.planner.plan import PodPlan, Products
from mstrain.planner.request import PlanRequest

ACCUMULATE_BYTES = 12  # per parameter and microbatch of several: two gradients read, one written
UPDATE_BYTES = 28  # per parameter: weight, gradient and two moments read, weight and moments written
NONE = Pass()


@dataclass(frozen=True)
class Terms:
    """Seconds of a step by what a device of one stage spends them on; they add up to the step.

    `messages` is what the way through the pipeline adds, `bubble` the rest of what the device waits.
    """

    products: float
    attention: float
    elementwise: float
    tensor_exposed: float
    recomputation: float
    messages: float
    bubble: float
    gradient_sum: float
    update: float

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers, seconds of a microbatch's two passes, and its memory."""

    chunks: tuple[tuple[int, int], ...]  # layers [begin, end); several where the schedule is interleaved
    forward: float
    backward: float
    memory: Memory
    in_flight: float  # microbatches between their passes; parts of one where the schedule is interleaved

    @property
    def layers(self) -> int:
        return sum(end - begin for begin, end in self.chunks)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Costed:
    """A plan with the terms of its slowest stage, and those of every stage."""

    plan: PodPlan
    terms: Terms
    stages: tuple[Stage, ...]
    stage_terms: tuple[Terms, ...]
    products: Products
    constants: str
    fits: bool  # in a device's usable memory

    @property
    def seconds(self) -> float:
        return self.terms.seconds

    @property
    def shape(self) -> MeshShape:
        """The mesh of one stage."""
        return self.plan.shape

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.memory.total)


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


def message_seconds(request: PlanRequest, plan: PodPlan, tokens: int, link: Link) -> float:
    """An activation to the next stage: each device sends its part."""
    nbytes = tokens * request.model.width * request.element_bytes / plan.tensor
    return link.launch + link.sync + nbytes / link.bandwidth if plan.pipeline > 1 else 0.0


def microbatches_in_flight(request: PlanRequest, plan: PodPlan, stage: int) -> float:
    """Microbatches that `stage` holds between their passes, at most (Narayanan et al., 2021)."""
    if request.fixed.schedule == "gpipe":
        return plan.microbatches
    chunks = request.fixed.chunks(plan.pipeline)
    if chunks == 1:
        return min(plan.microbatches, plan.pipeline - stage)
    passes = 2 * (plan.pipeline - stage - 1) + (chunks - 1) * plan.pipeline + 1
    return min(passes, plan.microbatches * chunks) / chunks


def cycle_seconds(stages: list[Stage], message: float, schedule: str) -> float:
    """Seconds between microbatches once the pipeline is full."""
    if schedule == "gpipe":
        return max(stage.forward for stage in stages) + max(stage.backward for stage in stages)
    if schedule == "interleaved":
        return max(stage.seconds for stage in stages)
    behind, loops = 0.0, []
    for count, stage in enumerate(reversed(stages)):
        behind += stage.seconds
        loops.append(max(stage.seconds, (behind + 2 * count * message) / (count + 1)))
    return max(loops)


def work_of(request: PlanRequest, plan: PodPlan, products: Products) -> tuple[Work, Constants]:
    """Passes of one microbatch, and the constants that they are computed with."""
    pod = request.pod
    constants = pod.constants((plan.pipeline, plan.data, plan.rows, plan.cols), request.dtype)
    return layer_work(request.model, products, request.seq, constants, pod.device(constants)), constants


def cost_plan(request: PlanRequest, plan: PodPlan, products: Products) -> Costed:
    """All terms of one plan that `plan_products` accepts."""
    work, constants = work_of(request, plan, products)
    again = work.recomputed(plan.remat)
    stages, passes = [], []
    layer_seconds = work.forward.seconds + work.backward.seconds + again.seconds
    head_seconds = work.head_forward.seconds + work.head_backward.seconds
    chunks = plan.pipeline * request.fixed.chunks(plan.pipeline)
    bounds = split_layers(request.model.layers, chunks, head_seconds / layer_seconds)
    for number in range(plan.pipeline):
        mine, last = tuple(bounds[number :: plan.pipeline]), number == plan.pipeline - 1
        layers = sum(end - begin for begin, end in mine)
        forward = work.forward * layers + (work.head_forward if last else NONE)
        backward = work.backward * layers + (work.head_backward if last else NONE)
        repeated = again * layers
        in_flight = microbatches_in_flight(request, plan, number)
        memory = stage_memory(request, products, plan, number, mine, in_flight)
        stages.append(Stage(mine, forward.seconds, backward.seconds + repeated.seconds, memory, in_flight))
        passes.append((forward + backward, repeated))
    between, replicas = request.pod.outer_links((plan.pipeline, plan.data, plan.rows, plan.cols), request.dtype)
    message = message_seconds(request, plan, products.block[0].layout.tokens, between.permute)
    longest = max(stage.seconds for stage in stages)
    others = sum(stage.seconds for stage in stages) - longest
    fill = longest + others / request.fixed.chunks(plan.pipeline)
    messages = 2 * (plan.pipeline - 1) * message
    pipeline = (plan.microbatches - 1) * cycle_seconds(stages, message, request.fixed.schedule) + fill + messages
    ends = [_end(request, plan, constants, (between, replicas), number, stage) for number, stage in enumerate(stages)]
    step = pipeline + sum(max(ends, key=sum))
    every = tuple(
        _terms(useful * plan.microbatches, repeated * plan.microbatches, messages, end, step)
        for (useful, repeated), end in zip(passes, ends)
    )
    slowest = max(range(len(stages)), key=lambda number: (stages[number].seconds, sum(ends[number])))
    fits = max(stage.memory.total for stage in stages) <= request.usable_bytes
    return Costed(plan, every[slowest], tuple(stages), every, products, constants.source, fits)


def _terms(useful: Pass, repeated: Pass, messages: float, end: tuple[float, float], step: float) -> Terms:
    """Terms of a stage in a step of so many seconds; what nothing else takes is the bubble."""
    summed, update = end
    busy = useful.seconds + repeated.seconds + messages + summed + update
    return Terms(
        products=useful.gemm,
        attention=useful.attention,
        elementwise=useful.elementwise,
        tensor_exposed=useful.exposed,
        recomputation=repeated.seconds,
        messages=messages,
        bubble=max(0.0, step - busy),
        gradient_sum=summed,
        update=update,
    )


def _end(request: PlanRequest, plan: PodPlan, constants: Constants, outer, number: int, stage: Stage):
    """(gradient sums over the replicas, update) of one stage, in seconds per step."""
    parameters = stage.memory.parameters / WEIGHT_BYTES
    part = WEIGHT_BYTES * parameters / plan.data
    between, links = outer
    summed = sum(collective_seconds(link, part, plan.data) for link in (links.reduce_scatter, links.all_gather))
    sums = plan.microbatches if plan.pipeline == 1 and not plan.sharded else 1
    model = request.model
    tied = model.tied and plan.pipeline > 1 and number in (0, plan.pipeline - 1)
    if tied:  # the first and the last stage add up the gradients of their copies of the table
        table = WEIGHT_BYTES * parameter_counts(model)[2] / plan.tensor
        summed += between.permute.launch + between.permute.sync + table / between.permute.bandwidth
    moved = UPDATE_BYTES / (plan.data if plan.sharded else 1)
    moved += ACCUMULATE_BYTES * plan.microbatches if plan.microbatches > 1 else 0
    return sums * summed, moved * parameters / request.pod.device(constants).memory_bandwidth
