"""Bytes per device by category, stage by stage.

Weights, gradients and optimizer state have the bytes of the execution style, sharded over the tensor devices; train.py
keeps float32 weights and the state of its optimizer, and two sets of gradients while microbatches accumulate. What a
plan shards over its replicas is divided by them; train.py shards float32 weights with the optimizer, and then holds
them once more, gathered, in the compute dtype. Where stages run in lockstep, all of them have the embedding, the output
projection and as many rows of layers as the deepest. Activations are what the backward pass needs: the parts that remat
saves, those in host memory not counted. No fragmentation, no compiler workspace beyond what is named.
"""

import dataclasses
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax

from mstrain.gemm.expert_exchange import MARGIN
from mstrain.layers import kept_loss
from mstrain.layers.loss import LARGEST, LARGEST_ON_GPU, cut_logits
from mstrain.models.config import ModelConfig
from mstrain.models.flops import mlp_parameters
from mstrain.models.parameters import canonical_model_shapes
from mstrain.models.products import attention_features, hidden_features
from mstrain.models.size import count_parameters
from mstrain.planner.layer import fused_attention
from mstrain.planner.plan import PodPlan, Product, Products
from mstrain.planner.remat import parse_remat
from mstrain.planner.request import SHARDS, PlanRequest
from mstrain.planner.stages import Stage, layers_by_group
from mstrain.program.optimizer import OptimizerConfig, make_optimizer

WEIGHT_BYTES = 4
SCORE_BYTES = 6  # of one score where attention keeps them: float32, and the 16-bit probability


@dataclass(frozen=True)
class Memory:
    """Bytes of one device of one stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def state(self) -> float:
        """What stays however little is computed at once."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def largest(self) -> str:
        """The category that takes most."""
        return max((field.name for field in dataclasses.fields(self)), key=lambda name: getattr(self, name))


@lru_cache(maxsize=64)
def parameter_counts(model: ModelConfig) -> tuple[int, int, int]:
    """(of one layer, of the embedding and positions, of the output projection and final norm); a layer behind the
    first, dense ones."""
    model = model.later_layers
    one, two = (count_parameters(dataclasses.replace(model, layers=layers)) for layers in (1, 2))
    head = model.width * model.known_vocab_size
    outside = one - (two - one)
    return two - one, outside if model.tied else outside - head, head


class Count(NamedTuple):
    """Parameters of a stage or device: of layers but their experts, of these, and of the embedding, positions, final
    norm and projection."""

    layers: float
    experts: float
    outside: float

    def over(self, devices: int) -> "Count":
        """Of one of so many devices."""
        return Count(*(count / devices for count in self))

    def held(self, expert: int) -> float:
        """The sum on a device of axis `expert` without `shard=`."""
        return self.layers + self.experts / expert + self.outside


@lru_cache(maxsize=4096)
def stage_parameters(model: ModelConfig, layers: tuple[int, ...], first: bool, last: bool) -> Count:
    """Of a stage with so many `layers` of each of `ModelConfig.layer_groups`; a table that is tied is on both ends of a
    pipeline."""
    _, embedding, head = parameter_counts(model)
    dense = total = 0
    for (kind, _), count in zip(model.layer_groups, layers, strict=True):
        experts = count * (kind.experts or 0) * mlp_parameters(kind, kind.mlp_dim)
        dense, total = dense + count * parameter_counts(kind)[0] - experts, total + experts
    return Count(dense, total, first * embedding + (last and not (first and model.tied)) * head)


@lru_cache(maxsize=64)
def moment_rates(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[float, float]:
    """Bytes of the optimizer's state per parameter (of layers, of all others), from the state itself; of the first,
    dense layers as of the others."""
    model = model.later_layers

    def size(layers: int) -> int:
        shapes = canonical_model_shapes(dataclasses.replace(model, layers=layers))
        state = jax.eval_shape(make_optimizer(optimizer).init, shapes)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim)  # counters are scalars

    one, two = size(1), size(2)
    layer, embedding, head = parameter_counts(model)
    outside = embedding + (0 if model.tied else head)
    return (two - one) / layer, (2 * one - two) / outside


def moment_bytes(request: PlanRequest, parameters: Count) -> float:
    """The state of the optimizer of so many parameters."""
    if not request.style.native:
        return request.style.state_bytes[2] * sum(parameters)
    layers, outside = moment_rates(request.model, request.optimizer)
    return layers * (parameters.layers + parameters.experts) + outside * parameters.outside


def saved_values(request: PlanRequest, plan: PodPlan) -> dict[str, float]:
    """Values per token and device of what a layer may keep, by the names of `mstrain.planner.remat`."""
    model, tensor = request.model, plan.tensor
    wide = model.width / (tensor if plan.sequence_parallel else 1)
    into, out = attention_features(model)
    hidden, sent = hidden_features(model), 0.0
    if plan.expert > 1 and model.experts:  # rows of rounds, with their margin
        hidden += (MARGIN - 1) * model.mlp_dim * model.experts_per_token
        sent = MARGIN * model.experts_per_token * model.width / tensor
    scores = 0.0 if fused_attention(request) else SCORE_BYTES / request.element_bytes * model.heads * request.seq
    return {
        "input": wide, "qkv": into / tensor, "scores": scores / tensor, "context": out / tensor,
        "out": wide, "mlp_in": hidden * (2 if model.gated else 1) / tensor, "mlp_out": wide,
        "elementwise": 3 * wide + hidden / tensor + sent,
    }  # fmt: skip


def layer_bytes(request: PlanRequest, plan: PodPlan, tokens: int, remat: str) -> float:
    """Activations that one layer keeps of one microbatch on one device."""
    sizes, policy = saved_values(request, plan), parse_remat(remat)
    return request.element_bytes * tokens * sum(sizes[part] for part in policy.saved - policy.offloaded)


def deferred_bytes(request: PlanRequest, plan: PodPlan, tokens: int) -> float:
    """What the gradients of a layer's weights need of one microbatch besides `layer_bytes`, when they are made later.

    The gradients of its products' results, and those inputs of products that only products recompute
    (`mstrain.models.halves`).
    """
    sizes, policy = saved_values(request, plan), parse_remat(plan.remat)
    values = sizes["qkv"] + sizes["out"] + sizes["mlp_in"] + sizes["mlp_out"]
    values += 0.0 if policy.name == "none" else sizes["context"]
    values += sizes["out"] if policy.recomputes("out") else 0.0
    values += hidden_features(request.model) / plan.tensor if policy.recomputes("mlp_in") else 0.0
    return request.element_bytes * tokens * values


def gathered_table(head: Product) -> float:
    """Entries of the embedding's table that one device gathers along the vocabulary; none if it has all."""
    layout = head.layout
    count = layout.cols if layout.dataflow == "rs" else layout.rows
    entries = layout.projection.in_dim * layout.projection.out_dim
    return entries * count / (layout.rows * layout.cols) if count > 1 else 0.0


def loss_bytes(head: Product, size: int, platform: str = "tpu") -> tuple[float, float]:
    """What train.py's loss holds at the most: (a chunk of logits with its gradient, what all chunks share).

    The latter is the operand that is not cut, gathered, with its gradient in float32 (`mstrain.layers.loss`). Where a
    GPU keeps all slopes (`mstrain.layers.kept_loss`), it is these, and the kernel with its gradient.
    """
    layout = head.layout
    tokens, width = layout.tokens // layout.rows, layout.projection.out_dim // layout.cols
    if platform == "gpu" and layout.rows * layout.cols == 1 and size * tokens * width <= kept_loss.KEPT:
        shared = size * tokens * width + (4 + size) * width * layout.projection.in_dim
        return float(min(4 * tokens * width, kept_loss.CHUNK)), float(shared)
    largest = LARGEST_ON_GPU if platform == "gpu" else LARGEST
    of_tokens, length = cut_logits(tokens, 1, width, layout.dataflow == "os" or layout.rows == 1, largest)
    chunk, whole = (length * width, width) if of_tokens else (tokens * length, tokens)
    return (4 + size) * chunk, (4 + size) * whole * layout.projection.in_dim


def state_bytes(request: PlanRequest, plan: PodPlan, parameters: Count) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, optimizer state) of so many parameters of one device before sharding over
    replicas."""
    weights, gradients = (size * sum(parameters) for size in request.style.state_bytes[:2])
    held = parameters.held(plan.expert) / sum(parameters) if sum(parameters) else 1.0  # where nothing else is sharded
    if request.style.native and plan.microbatches > 1:
        gradients *= 2 if request.optimizer.gradients == "f32" else 1.5
    sharded = SHARDS.index(plan.shard)
    sizes = (weights, gradients, moment_bytes(request, parameters))
    levels = (1 if request.style.native else 3, 2, 1)
    weights, gradients, optimizer = (
        size / plan.replicas if sharded >= level else size * held for size, level in zip(sizes, levels)
    )
    if request.style.native and 0 < sharded < len(SHARDS) - 1:
        weights += request.element_bytes * sum(parameters) * held
    return weights, gradients, optimizer


def held_bytes(request: PlanRequest, plan: PodPlan, tokens: int, held: tuple[float, int]) -> list[float]:
    """Activations of one layer of each group with so many microbatches between their passes, and for gradients of
    weights that are made later."""
    return [
        layer_bytes(kind, plan, tokens, plan.remat) * held[0] + deferred_bytes(kind, plan, tokens) * held[1]
        for kind, _ in request.layer_groups
    ]


def stage_memory(request: PlanRequest, products: Products, plan: PodPlan, stage: Stage) -> Memory:
    """Memory of a device of a stage.

    Where chunks differ, all that is held is taken to be of the largest; in lockstep so are the weights.
    """
    kinds, held = request.layer_groups, (stage.in_flight, stage.deferred)
    model, size, tokens, tensor = request.model, request.element_bytes, products.tokens, plan.tensor
    (first, last), lockstep = stage.ends, request.style.lockstep and plan.pipeline > 1
    counts = [count for _, count in kinds]
    layers, chunks = stage.holds, [layers_by_group(chunk, counts) for chunk in stage.chunks]
    if lockstep:  # all stages have the first, dense layers, and compute them again in the backward pass
        deepest = max(chunk[-1] for chunk in chunks)
        layers, chunks = (*counts[:-1], deepest * len(chunks)), [(*[0] * len(counts[1:]), deepest)] * len(chunks)
    state = state_bytes(request, plan, stage_parameters(model, layers, first, last).over(tensor))
    each = held_bytes(request, plan, tokens, held)
    kept = len(chunks) * max(sum(map(operator.mul, chunk, each)) for chunk in chunks)
    gathered = products.gathered_bytes
    if plan.shard == "parameters":  # the weights of this layer and of the next, and those of the first, dense layers
        ready = stage_parameters(model, (*layers[:-1], 2), False, False)
        gathered += size * ready.over(tensor).held(plan.expert)
    whole = 0.0 if plan.remat == "none" else max(layer_bytes(kind, plan, tokens, "none") for kind, _ in kinds)
    moments, waiting = [gathered + whole], 0.0  # a layer's backward pass
    if lockstep:
        again = sum(map(operator.mul, counts[:-1], held_bytes(request, plan, tokens, (1, 0))))
        moments.append(gathered + whole + again)
    ahead = plan.microbatches if plan.schedule == "gpipe" else 1  # forward passes not yet turned back
    if last:  # in lockstep every stage has a slot for each gradient of the last activations
        kept += size * model.width * tokens / tensor * (stage.in_flight * len(chunks) if lockstep else ahead)
        if request.style.native:  # chunks, in both passes
            moments.append(sum(loss_bytes(products.head, size, request.pod.chip.platform)))
        else:  # logits with a float32 copy between their passes, and the gradient of one microbatch's
            logits = tokens * products.head.layout.projection.out_dim / tensor
            waiting = (size + 4) * logits * (ahead - 1)
            moments.append(gathered + (2 * size + 4) * logits)
    table = gathered_table(products.head) if first else 0.0  # ready for lookups during the whole step
    if first:  # its gradient comes when a microbatch's activations are gone
        moments.append(WEIGHT_BYTES * table - kept / stage.in_flight)
    return Memory(*state, kept, max(moments) + waiting + size * table)
