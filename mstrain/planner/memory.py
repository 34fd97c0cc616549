"""Bytes per device by category, stage by stage.

Weights, gradients and optimizer state have the bytes of the execution style, sharded over the tensor devices; train.py
keeps float32 weights and the state of its optimizer, and two sets of gradients while microbatches accumulate. What a
plan shards over its replicas is divided by them; train.py shards float32 weights with the optimizer, and then holds
them once more, gathered, in the compute dtype. Where stages run in lockstep, all of them have the embedding, the output
projection and as many rows of layers as the deepest. Activations are what the backward pass needs: the parts that remat
saves, those in host memory not counted. No fragmentation, no compiler workspace beyond what is named.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax

from mstrain.gemm.expert_exchange import MARGIN
from mstrain.layers.loss import cut_logits
from mstrain.models.config import ModelConfig
from mstrain.models.flops import mlp_parameters
from mstrain.models.parameters import canonical_model_shapes
from mstrain.models.size import count_parameters
from mstrain.planner.layer import fused_attention
from mstrain.planner.plan import PodPlan, Product, Products
from mstrain.planner.remat import parse_remat
from mstrain.planner.request import SHARDS, PlanRequest
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
    """(of one layer, of the embedding and positions, of the output projection and final norm)."""
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


def stage_parameters(model: ModelConfig, layers: int, first: bool, last: bool) -> Count:
    """Of a stage with so many layers; a table that is tied is on both ends of a pipeline."""
    layer, embedding, head = parameter_counts(model)
    experts = (model.experts or 0) * mlp_parameters(model, model.mlp_dim)
    outside = first * embedding + (last and not (first and model.tied)) * head
    return Count(layers * (layer - experts), layers * experts, outside)


@lru_cache(maxsize=64)
def moment_rates(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[float, float]:
    """Bytes of the optimizer's state per parameter (of layers, of all others), from the state itself."""

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
    heads, kv = model.heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    hidden = model.mlp_dim * (model.experts_per_token if model.experts else 1)
    sent = 0.0
    if plan.expert > 1:  # rows of rounds, with their margin
        hidden, sent = MARGIN * hidden, MARGIN * model.experts_per_token * model.width / tensor
    scores = 0.0 if fused_attention(request) else SCORE_BYTES / request.element_bytes * model.heads * request.seq
    return {
        "input": wide, "qkv": (heads + kv) / tensor, "scores": scores / tensor, "context": heads / tensor,
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
    values += request.model.mlp_dim / plan.tensor if policy.recomputes("mlp_in") else 0.0
    return request.element_bytes * tokens * values


def gathered_table(head: Product) -> float:
    """Entries of the embedding's table that one device gathers along the vocabulary; none if it has all."""
    layout = head.layout
    count = layout.cols if layout.dataflow == "rs" else layout.rows
    entries = layout.projection.in_dim * layout.projection.out_dim
    return entries * count / (layout.rows * layout.cols) if count > 1 else 0.0


def loss_bytes(head: Product, size: int) -> tuple[float, float]:
    """What train.py's loss holds at the most: (a chunk of logits with its gradient, what all chunks share).

    The latter is the operand that is not cut, gathered, with its gradient in float32 (`mstrain.layers.loss`).
    """
    layout = head.layout
    tokens, width = layout.tokens // layout.rows, layout.projection.out_dim // layout.cols
    of_tokens, length = cut_logits(tokens, 1, width, layout.dataflow == "os" or layout.rows == 1)
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


def stage_memory(
    request: PlanRequest, products: Products, plan: PodPlan, ends: tuple[bool, bool], chunks, held: tuple[float, int]
) -> Memory:
    """Memory of a device of a stage, whose layers are in `chunks`, with so many microbatches `held` between their
    passes, and for the gradients of weights that are made later.

    `ends`: whether the stage has the embedding, and the output projection. Where chunks differ, all that is held is
    taken to be of the largest; in lockstep so are the weights.
    """
    in_flight, deferred = held
    sizes = [end - begin for begin, end in chunks]
    model, size, tokens, tensor = request.model, request.element_bytes, products.tokens, plan.tensor
    (first, last), lockstep = ends, request.style.lockstep and plan.pipeline > 1
    deepest = max(sizes) * len(sizes)
    parameters = stage_parameters(model, deepest if lockstep else sum(sizes), first, last)
    state = state_bytes(request, plan, parameters.over(tensor))
    each = layer_bytes(request, plan, tokens, plan.remat) * in_flight + deferred_bytes(request, plan, tokens) * deferred
    kept = deepest * each
    gathered = products.gathered_bytes
    if plan.shard == "parameters":  # the weights of this layer and of the next
        gathered += 2 * size * stage_parameters(model, 1, False, False).over(tensor).held(plan.expert)
    whole = 0.0 if plan.remat == "none" else layer_bytes(request, plan, tokens, "none")
    moments, waiting = [gathered + whole], 0.0  # a layer's backward pass
    ahead = plan.microbatches if plan.schedule == "gpipe" else 1  # forward passes not yet turned back
    if last:  # in lockstep every stage has a slot for each gradient of the last activations
        kept += size * model.width * tokens / tensor * (in_flight * len(sizes) if lockstep else ahead)
    if last:
        if request.style.native:  # chunks, in both passes
            moments.append(sum(loss_bytes(products.head, size)))
        else:  # logits with a float32 copy between their passes, and the gradient of one microbatch's
            logits = tokens * products.head.layout.projection.out_dim / tensor
            waiting = (size + 4) * logits * (ahead - 1)
            moments.append(gathered + (2 * size + 4) * logits)
    table = gathered_table(products.head) if first else 0.0  # ready for lookups during the whole step
    if first:  # its gradient comes when a microbatch's activations are gone
        moments.append(WEIGHT_BYTES * table - kept / in_flight)
    return Memory(*state, kept, max(moments) + waiting + size * table)
