"""Seconds of a stated step by term, with the standard error that the model gives itself.

    step = M x slowest stage + (P - 1) / V x stage x bubble share + messages + gradient sums + update

for M microbatches, P stages and V chunks a stage. Gradient sums, gathers of sharded weights and messages run under
compute where the execution style says so; then what is longer than the compute is charged. A synchronous step takes
as long as the slowest of N devices: with normal variation, sqrt(2 ln N) standard deviations longer than the mean.
"""

import math
from dataclasses import asdict, dataclass

from mstrain.models.transformer import count_parameters
from mstrain.planner.memory import parameter_counts
from mstrain.planner.stated.layer import HIDDEN_PART, Parts, Passes, head_passes, layer_passes
from mstrain.planner.stated.plan import StatedStep

# Relative standard errors of the terms besides that of products, which the table of efficiencies gives.
ERRORS = {
    "attention": 0.25, "elementwise": 0.2, "tensor": 0.25, "context": 0.3, "bubble": 0.15, "messages": 0.4,
    "data": 0.3, "update": 0.3, "stragglers": 0.5,
}  # fmt: skip
UNSTATED = 0.06  # of the step: what no term covers (input, host, stragglers), and choices that a row leaves open


@dataclass(frozen=True)
class StatedCost:
    """Seconds of a step of one device of the slowest stage by term, and their sum's relative standard error."""

    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    recomputation: float
    bubble: float
    messages: float
    data: float
    update: float
    stragglers: float
    uncertainty: float

    @property
    def seconds(self) -> float:
        return sum(value for name, value in asdict(self).items() if name != "uncertainty")


def weights_per_device(step: StatedStep) -> float:
    """Parameters of the largest stage on one device, not sharded over the data axis."""
    layer, embedding, head = parameter_counts(step.model)
    degrees = step.plan.degrees
    if degrees.pipeline == 1:
        return count_parameters(step.model) / degrees.tensor
    return (step.layers * layer + max(embedding, head)) / degrees.tensor


def _data_seconds(step: StatedStep, layer: Passes, head: Passes) -> float:
    """Exposed gathers of weights and sums of gradients over the replicas, per step."""
    style, shard, group = step.plan.style, step.plan.shard, step.group("replica")
    if group.size == 1:
        return 0.0
    fabric, weights = step.fabric, weights_per_device(step)
    ahead = step.layers * layer.forward.seconds + head.forward.seconds
    behind = step.layers * (layer.backward.seconds + layer.repeated.seconds) + head.backward.seconds
    scatter = fabric.scatter_seconds(style.gradient_bytes * weights, group)
    gather = fabric.scatter_seconds(2.0 * weights, group)
    if "data" not in style.hides or not fabric.efficiency.overlap:
        ahead = behind = 0.0
    layers = max(1.0, step.layers)
    first = gather / layers  # nothing runs yet that could hide the first gather, nor after the last sum
    if shard == "parameters":
        once = max(0.0, gather - HIDDEN_PART * ahead) + max(0.0, gather + scatter - HIDDEN_PART * behind)
        return step.microbatches * once + first + scatter / layers
    sums = step.microbatches if shard == "gradients" else 1
    exposed = sums * max(scatter / layers, scatter - HIDDEN_PART * behind)
    other = gather if shard != "none" else scatter  # the second half of an all-reduce moves gradients
    return exposed + max(other / layers, other - HIDDEN_PART * (ahead if shard != "none" else behind))


def _messages(step: StatedStep) -> tuple[float, float]:
    """(exposed seconds per step, seconds of one message) between stages."""
    degrees, style = step.plan.degrees, step.plan.style
    if degrees.pipeline == 1:
        return 0.0, 0.0
    nbytes = step.tokens * step.model.width * step.activation_bytes / degrees.tensor
    stride = degrees.tensor * degrees.context * degrees.data
    one = step.fabric.message_seconds(nbytes, stride)
    if degrees.tensor > 1 and not step.plan.sequence_parallel:  # parts are sent and gathered by NVLink
        one += step.fabric.scatter_seconds(nbytes * degrees.tensor, step.group("tensor"))
    chunks = step.plan.interleave if step.plan.schedule == "interleaved" else 1
    crossings = 2 * (degrees.pipeline - 1)
    if "pipeline" not in style.hides:
        crossings += 2 * (step.microbatches * chunks - 1)
    return crossings * one, one


def _bubble(step: StatedStep, layer: Passes, head: Passes) -> float:
    """Seconds in which the last stage waits for the others."""
    plan, stages = step.plan, step.plan.degrees.pipeline
    stage = step.layers * (layer.forward.seconds + layer.backward.seconds + layer.repeated.seconds)
    if plan.schedule == "zero-bubble":  # Qi et al., 2023, ZB-H1: weight gradients fill two thirds
        waits = step.layers * (layer.forward.seconds + layer.backward.seconds - 2 * layer.weight_products)
        return (stages - 1) * max(0.0, waits)
    chunks = plan.interleave if plan.schedule == "interleaved" else 1
    return (stages - 1) * stage / chunks


def cost_step(step: StatedStep) -> StatedCost:
    """All terms of a stated step."""
    layer, head = layer_passes(step), head_passes(step)
    count = step.microbatches
    useful: Parts = (layer.forward + layer.backward) * step.layers + head.forward + head.backward
    repeated = layer.repeated * step.layers
    weights = weights_per_device(step)
    shards = 1 if step.plan.shard == "none" else step.group("replica").size
    fabric = step.fabric
    moved = weights * step.plan.style.update_bytes / shards
    if count > 1:
        kept = shards if step.plan.shard in ("gradients", "parameters") else 1
        moved += step.plan.style.accumulate_bytes * weights * count / kept
    schedule = fabric.efficiency.schedule
    waits = fabric.efficiency.spread * math.sqrt(2 * math.log(fabric.devices))
    terms = {name: schedule * count * value for name, value in asdict(useful).items()}
    terms |= {
        "recomputation": schedule * count * repeated.seconds,
        "bubble": schedule * _bubble(step, layer, head),
        "messages": _messages(step)[0],
        "data": _data_seconds(step, layer, head),
        "update": fabric.efficiency.stream_seconds(fabric.chip, moved),
    }
    terms["stragglers"] = waits * sum(terms.values())
    return StatedCost(**terms, uncertainty=_uncertainty(step, terms))


def _uncertainty(step: StatedStep, terms: dict[str, float]) -> float:
    """Relative standard error of the step: its terms are wrong independently; attention is not a product."""
    errors = {**ERRORS, "products": step.fabric.efficiency.uncertainty}
    errors["recomputation"] = max(errors["products"], 0.1)
    total = sum(terms.values())
    return math.sqrt(UNSTATED**2 + sum((errors[name] * value / total) ** 2 for name, value in terms.items()))
