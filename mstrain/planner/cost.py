"""The cost model: seconds of a step by term with their standard errors, and the memory of every stage.

    step = (M - 1) * cycle + slowest + fill / V + messages + gradient sums + update + stragglers

M is the number of microbatches, V the number of chunks per stage, and the time of a stage is that of the forward and
backward pass of one microbatch. `slowest` is the time of the slowest stage, `fill` the sum over the other stages.

`cycle` is the time between microbatches in a full pipeline. For GPipe it is the slowest forward pass plus the slowest
backward pass. For 1F1B it is the slowest stage or, if longer, the round trip through stages s to P - 1, divided by the
P - s microbatches in flight there. For other schedules it is the slowest stage. With zero-bubble, `fill` excludes the
weight gradients, for which no stage waits; without lockstep it excludes them twice, because stages compute weight
gradients while they would otherwise wait. Pipeline stages of train.py run in lockstep: each computes as many layers as
the deepest stage.

Gradient sums, all-gathers of sharded weights and messages overlap with compute where the execution style says so; only
their exposed time is charged. train.py sums gradients over the replicas once per microbatch, in a pipeline once per
step. `stragglers` is the time of measured steps beyond that of compiled or simulated ones: a synchronous step waits for
the slowest of N devices, sqrt(2 ln N) standard deviations above the mean, and TPUs are slower than their schedules.
"""

import functools
import math
from dataclasses import dataclass, field

from mstrain.gemm import find_algorithm
from mstrain.hardware import collective_seconds
from mstrain.hardware.expert_links import owner_links
from mstrain.mesh import MeshShape
from mstrain.models.parallel import layer_algorithms
from mstrain.models.stages import even_layers
from mstrain.parallel.schedules import WHOLE
from mstrain.planner.errors import MEASURED, TermError, term_errors
from mstrain.planner.layer import Pass, Work, exposed_beside, layer_works, setting_of
from mstrain.planner.memory import (
    WEIGHT_BYTES,
    Count,
    Memory,
    moment_bytes,
    parameter_counts,
    saved_values,
    stage_memory,
    stage_parameters,
)
from mstrain.planner.plan import PodPlan, Products, plan_products
from mstrain.planner.remat import Remat, parse_remat
from mstrain.planner.request import PlanRequest
from mstrain.planner.stages import (
    Stage,
    bounds_of,
    cycle_seconds,
    layers_by_group,
    microbatches_deferred,
    microbatches_in_flight,
    split_layers,
)
from mstrain.planner.trainer import why_not_trainable

NONE = Pass()


@dataclass(frozen=True)
class Terms:
    """Seconds by term of a step of one device of a stage; the terms add up to the step time.

    `tensor_exposed` and `context` are exposed communication. `messages` are sends between stages and broadcasts to all
    stages; `bubble` is the remaining time in which the device waits.
    """

    products: float
    attention: float
    elementwise: float
    tensor_exposed: float
    context: float
    recomputation: float
    offload: float
    messages: float
    bubble: float
    gradient_sum: float
    update: float
    stragglers: float

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Costed:
    """A plan with the `terms` of its slowest stage and the memory of the stage that needs most (`fullest`).

    `fits`: whether `fullest` fits in the usable memory of a device. `step` computes terms and memory of any stage.
    """

    plan: PodPlan
    terms: Terms
    fullest: Memory
    fits: bool
    step: "Step" = field(repr=False, compare=False)

    @property
    def products(self) -> Products:
        return self.step.products

    @property
    def stages(self) -> list[Stage]:
        return self.step.stages

    @functools.cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Memory of a device of each stage."""
        return tuple(self.step.memory(self.plan, number) for number in range(len(self.stages)))

    @functools.cached_property
    def stage_terms(self) -> tuple[Terms, ...]:
        """Terms of each stage."""
        return tuple(self.step.terms(self.plan, number) for number in range(len(self.stages)))

    @property
    def seconds(self) -> float:
        return self.terms.seconds

    @property
    def scheduled_seconds(self) -> float:
        """Seconds without `stragglers`: of a compiled or simulated step, in which all devices are equally fast."""
        return self.seconds - self.terms.stragglers

    @functools.cached_property
    def errors(self) -> tuple[TermError, ...]:
        """Standard errors of the terms, the largest contribution first."""
        pod = self.step.request.pod
        return term_errors(vars(self.terms), pod.efficiency.error if pod.derived else MEASURED)

    @property
    def uncertainty(self) -> float:
        """Relative standard error of the step time, assuming that the errors of terms are independent."""
        return math.hypot(*(each.of_step for each in self.errors))

    @property
    def product_rate(self) -> float:
        """Mean FLOP/s of one device during the matrix products of the first stage."""
        stage, tensor = self.stages[0], self.plan.tensor
        values = sum(
            count * sum(share * sum(p.layout.multiplications for p in block) for block, share in kind.groups)
            for kind, count in zip(self.products.kinds, stage.computes)
        )
        head = 0 if self.plan.pipeline > 1 else self.products.head.layout.multiplications
        flops = 6.0 * values + (8.0 if self.step.request.style.native else 6.0) * head
        return self.products.tokens * flops / tensor / (stage.useful_forward.gemm + stage.useful_backward.gemm)

    @property
    def shape(self) -> MeshShape:
        """The mesh of train.py."""
        return self.plan.mesh(self.step.request.pod.slices)

    @property
    def why_not_trainable(self) -> str:
        """The reason why train.py cannot run the plan; empty if it can."""
        return why_not_trainable(self.plan, self.step.request.pod.slices)


def cost_plan(request: PlanRequest, plan: PodPlan, products: Products) -> Costed:
    """Predicts the time and memory of a plan with the given products."""
    return Step(request, plan, products, layer_works(request, plan, products)).cost(plan)


def cost_step(request: PlanRequest, plan: PodPlan) -> Costed | None:
    """Predicts the time and memory of a plan; None if the plan is illegal or its algorithm is not in the cost model."""
    used = {name for pair in layer_algorithms(plan.parallel, request.model.layers) for name in pair}
    products = plan_products(request, plan) if all(find_algorithm(name).costed for name in used) else "unknown"
    return None if isinstance(products, str) else cost_plan(request, plan, products)


class Step:
    """A step of a plan, whatever its `shard`: its stages, and `scheduled`, the seconds of all microbatches."""

    def __init__(self, request: PlanRequest, plan: PodPlan, products: Products, works: tuple[Work, ...]):
        self.request, self.plan, self.products, self.works = request, plan, products, works
        self.style, self.at, remat = request.style, setting_of(request, plan), parse_remat(plan.remat)
        self.repeated = [work.repeated(remat, self.style, self.at.fused) for work in works]
        self.again = [work.recomputed(repeated) for work, repeated in zip(works, self.repeated)]
        self.host = [self._offload(remat.offloaded, kind, work) for (kind, _), work in zip(request.layer_groups, works)]
        self.stacked = [self._stacked(remat, kind) for kind, _ in request.layer_groups]
        self.stages = self._stages()
        self.scheduled, self.messages = self._pipeline(self._message())

    def _offload(self, parts: frozenset[str], kind: PlanRequest, work: Work) -> float:
        """Exposed seconds of a layer's transfers to and from host memory, which overlap with compute in both passes."""
        if not parts:
            return 0.0
        sizes = saved_values(kind, self.plan)
        one_way = sum(sizes[part] for part in parts) * self.products.tokens * self.request.element_bytes
        return 2 * max(0.0, one_way / self.request.pod.efficiency.host - work.backward.seconds / 2)

    def _stacked(self, remat: Remat, kind: PlanRequest) -> Pass:
        """Time, in each pass, to copy the saved values of a layer to or from the stacked values of all layers.

        Results of expert kernels are copied more often, because XLA cannot write them into the stack directly.
        """
        sizes = saved_values(kind, self.plan)
        copied = self.style.stacked_passes * sum(sizes[part] for part in remat.saved)
        if kind.model.experts:
            values = sizes["mlp_in"] * (not remat.recomputes("mlp_in"))
            if remat.name == "none":  # the result of the activation function, and sorted or exchanged rows
                values += sizes["elementwise"] - 3 * sizes["input"]
            copied += self.style.kernel_passes * values
        moved = copied * self.products.tokens * self.request.element_bytes
        return Pass(elementwise=moved / self.at.elementwise_bandwidth)

    def _stages(self) -> list[Stage]:
        plan, work, counts = self.plan, self.works[-1], [count for _, count in self.request.layer_groups]
        chunks, first = plan.pipeline * plan.chunks, sum(counts[:-1])
        rows, lockstep = even_layers(counts[-1], chunks), self.lockstep
        if lockstep:  # every stage computes as many layers as the first
            bounds = bounds_of((first + rows[0], *rows[1:]))
        else:
            layer = work.forward.seconds + work.backward.seconds + self.again[-1].seconds + self.host[-1]
            head = (work.head_forward.seconds + work.head_backward.seconds) / layer if self.style.native else 0.0
            bounds = split_layers(sum(counts), chunks, head)
        stages, passes = [], functools.cache(self._passes)
        for number in range(plan.pipeline):
            mine, last = tuple(bounds[number :: plan.pipeline]), number == plan.pipeline - 1
            holds = computes = tuple(map(sum, zip(*(layers_by_group(each, counts) for each in mine))))
            if lockstep:  # all stages have the first, dense layers, which run outside the pipeline, as the projection
                holds = *counts[:-1], holds[-1]
                computes = *(last * count for count in counts[:-1]), plan.chunks * rows[0]
            counted = plan, number, self.style.lockstep
            held = microbatches_in_flight(*counted), microbatches_deferred(*counted)
            ends = lockstep or number == 0, lockstep or last
            stages.append(Stage(mine, holds, computes, *passes(computes, last), *held, ends))
        return stages

    def _passes(self, layers: tuple[int, ...], last: bool) -> tuple[Pass, Pass, Pass, float, float]:
        """(forward, backward, recomputation, host transfers, weight gradients) of a stage with `layers` per group."""
        head = self.works[-1]
        forward, backward = (head.head_forward, head.head_backward) if last else (NONE, NONE)
        weights, repeated, host = last * head.weights[1], NONE, 0.0
        for number, (work, count) in enumerate(zip(self.works, layers)):
            stacked = self.stacked[number]
            forward += (work.forward + stacked) * count
            backward += (work.backward + stacked) * count
            weights, host = weights + work.weights[0] * count, host + self.host[number] * count
            twice = self.lockstep and number + 1 < len(layers)  # first, dense layers are recomputed from the tokens
            repeated += (self.again[number] + (work.forward if twice else NONE)) * count
        return forward, backward, repeated, host, weights

    @property
    def lockstep(self) -> bool:
        """Whether all stages run one program, in which each computes as many layers as the deepest stage."""
        return self.style.lockstep and self.plan.pipeline > 1

    def _message(self) -> float:
        """Seconds to send an activation, in shards, to the next stage; all-gathered there if not sequence-parallel."""
        if self.plan.pipeline == 1:
            return 0.0
        gather = collective_seconds(
            (self.at.links.ring or self.at.links.row).all_gather, self._part_bytes, self.plan.tensor
        )
        whole = 0.0 if self.plan.sequence_parallel else gather
        return collective_seconds(self.at.links.stage.permute, self._part_bytes, 2) + whole

    @property
    def _part_bytes(self) -> float:
        """Bytes of one device's shard of the activations of a microbatch between two layers."""
        return self.products.tokens * self.request.model.width * self.request.element_bytes / self.plan.tensor

    @property
    def broadcasts(self) -> float:
        """Seconds per microbatch to broadcast, in lockstep, the activations of the last stage (for the loss) and the
        gradient of the first (for the embedding) to all stages: all_reduces to which other stages contribute zeros."""
        if not self.lockstep:
            return 0.0
        links, count = self.at.links.stage, self.plan.pipeline
        halves = (links.reduce_scatter, links.all_gather)
        return 2 * sum(collective_seconds(link, self._part_bytes / count, count) for link in halves)

    def _pipeline(self, message: float) -> tuple[float, float]:
        """(seconds of all microbatches in all stages, seconds of messages among them)."""
        plan, stages = self.plan, self.stages
        longest = max(range(len(stages)), key=lambda number: stages[number].seconds)
        fill = 0.0
        excluded = 0 if plan.schedule in WHOLE else 1 if self.style.lockstep else 2  # times of weight gradients (ZB-H1)
        for stage in stages[:longest] + stages[longest + 1 :]:
            fill += max(0.0, stage.seconds - excluded * stage.weights)
        crossings = 2 * (plan.pipeline - 1)
        if plan.pipeline > 1 and not self.style.native and "pipeline" not in self.style.hides:
            crossings += 2 * (plan.microbatches * plan.chunks - 1)
        cycles = (plan.microbatches - 1) * cycle_seconds(stages, message, plan.schedule)
        messages = crossings * message + plan.microbatches * self.broadcasts
        return cycles + stages[longest].seconds + fill / plan.chunks + messages, messages

    def _end(self, plan: PodPlan, number: int) -> tuple[float, float]:
        """(exposed communication between replicas, optimizer update) of one stage, in seconds per step."""
        stage, style, model = self.stages[number], self.style, self.request.model
        parameters = stage_parameters(model, stage.holds, *stage.ends).over(plan.tensor)
        weights, held = sum(parameters), parameters.held(plan.expert)
        summed = self._replicas(plan, parameters, stage)
        if model.tied and plan.pipeline > 1 and any(stage.ends) and not self.lockstep:  # both ends have the table
            table = WEIGHT_BYTES * parameter_counts(model)[2] / plan.tensor
            summed += collective_seconds(self.at.links.stage.permute, table, 2)
        moved = style.update_bytes * weights
        if style.native:  # update_bytes is for AdamW, which reads and writes two moments; another optimizer differs
            moved += 2 * (moment_bytes(self.request, parameters) - style.state_bytes[2] * weights)
        moved *= 1 / plan.replicas if plan.shard != "none" else held / weights if weights else 1
        if plan.microbatches > 1:
            kept = weights / plan.replicas if plan.shards_gradients else held
            moved += style.accumulate_bytes * plan.microbatches * kept
        return summed, moved / self.at.elementwise_bandwidth

    def _replicas(self, plan: PodPlan, parameters: Count, stage: Stage) -> float:
        """Exposed seconds per step of all-gathers of weights and sums of gradients over the replicas."""
        style, count = self.style, plan.replicas
        if count == 1:
            return 0.0
        weights = parameters.held(plan.expert)
        parts = [(self.at.links.replica, weights, count)]
        if plan.expert > 1:  # experts have fewer replicas
            few = owner_links(self.request.pod, plan.sizes, plan.expert)
            experts = parameters.experts / plan.expert
            parts = [(self.at.links.replica, weights - experts, count), (few, experts, count // plan.expert)]

        def seconds(kind: str, size: float) -> float:
            return sum(collective_seconds(getattr(links, kind), size * part / n, n) for links, part, n in parts)

        gather, scatter = seconds("all_gather", 2.0), seconds("reduce_scatter", style.gradient_bytes)
        spread = seconds("all_gather", style.gradient_bytes)
        hides = "data" in style.hides and (plan.shard == "parameters" or not style.native)
        pod = self.request.pod
        share = hides * (pod.efficiency.hidden_of_replicas(pod.slices, style.native) if pod.derived else 1.0)
        layers, platform = max(1, stage.layers), pod.chip.platform

        def exposed(seconds: float, under: float) -> float:
            return seconds - share * (seconds - exposed_beside(seconds, under, platform))

        if plan.shard == "parameters":  # the first all-gather of every pass of a stage and the last sum are exposed
            passes = 2 * plan.microbatches * plan.chunks if plan.pipeline > 1 else 1
            once = exposed(gather, stage.forward) + exposed(gather + scatter, stage.backward)
            once += self.copies(plan, parameters)
            return plan.microbatches * once + (passes * gather + scatter) / layers
        each = style.native and plan.pipeline == 1 and plan.shard == "none"
        sums = plan.microbatches if each or plan.shard == "gradients" else 1
        under = stage.backward if sums == 1 else stage.seconds  # a sum overlaps with the next microbatch
        waited = sums * max(scatter / layers, exposed(scatter, under))
        if plan.shard == "none":  # the second half of an all-reduce
            return waited + (sums if each else 1) * max(spread / layers, exposed(spread, stage.backward))
        return waited + max(gather / layers, exposed(gather, stage.forward))

    def copies(self, plan: PodPlan, parameters: Count) -> float:
        """Seconds per microbatch to copy all-gathered weights and their gradients, with `shard=parameters`."""
        if plan.shard != "parameters" or plan.replicas == 1:
            return 0.0
        style, experts = self.style, parameters.experts / plan.expert
        dense = parameters.held(plan.expert) - experts
        copied = style.gathered_bytes * dense + (style.expert_bytes or style.gathered_bytes) * experts
        return copied / self.at.elementwise_bandwidth

    def memory(self, plan: PodPlan, number: int) -> Memory:
        """Memory of a device of stage `number`."""
        return stage_memory(self.request, self.products, plan, self.stages[number])

    def _ends(self, plan: PodPlan) -> dict[int, tuple[float, float]]:
        """`_end` of the first and the last stage; no other stage has more weights, layers or activations."""
        return {number: self._end(plan, number) for number in {0, plan.pipeline - 1}}

    def cost(self, plan: PodPlan) -> Costed:
        """Predicts the step of `plan`, which differs from `self.plan` in `shard` only."""
        ends = self._ends(plan)
        slowest = max(ends, key=lambda number: (self.stages[number].seconds, sum(ends[number])))
        fullest = max((self.memory(plan, number) for number in ends), key=lambda memory: memory.total)
        return Costed(plan, self.terms(plan, slowest, ends), fullest, fullest.total <= self.request.usable_bytes, self)

    def terms(self, plan: PodPlan, number: int, ends: dict[int, tuple[float, float]] | None = None) -> Terms:
        """Terms of stage `number`; the bubble is the time that the other terms leave."""
        stage, pod, ends = self.stages[number], self.request.pod, ends or self._ends(plan)
        useful, count = stage.useful_forward + stage.useful_backward, self.plan.microbatches
        scheduled = self.scheduled + max(map(sum, ends.values()))
        end = ends[number] if number in ends else self._end(plan, number)
        busy = count * stage.seconds + self.messages + sum(end)
        beyond = 0.0
        if pod.derived:
            beyond = (pod.efficiency.schedule - 1) * (self.scheduled - self.messages)
            beyond += pod.efficiency.spread * math.sqrt(2 * math.log(pod.devices)) * (scheduled + beyond)
        return Terms(
            products=count * useful.gemm,
            attention=count * useful.attention,
            elementwise=count * useful.elementwise,
            tensor_exposed=count * useful.exposed,
            context=count * useful.context,
            recomputation=count * stage.repeated.seconds,
            offload=count * stage.host,
            messages=self.messages,
            bubble=max(0.0, scheduled - busy),
            gradient_sum=end[0],
            update=end[1],
            stragglers=beyond,
        )
