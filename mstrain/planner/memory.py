"""Bytes per device by category, for each stage.

Weights, gradients and optimizer state have the bytes per parameter of the execution style, and are sharded over the
tensor-parallel devices. train.py keeps float32 weights and the state of its optimizer, and two sets of gradients while
it accumulates microbatches. States that a plan shards over its replicas are divided by their number; train.py shards
float32 weights with the optimizer, and then has a second, all-gathered copy in the compute dtype. In lockstep, all
stages have the embedding, the output projection and as many layers as the deepest stage. Activations are the values
that remat saves for the backward pass, without those in host memory. Fragmentation is not modeled, and of the
compiler's workspace only the buffers in `stage_memory`.
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

WEIGHT_BYTES = 4  # float32
SCORE_BYTES = 6  # per attention score, if they are saved: a float32 score and a 16-bit probability


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
        """Bytes that do not depend on the number of microbatches in flight: all but activations and workspace."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def largest(self) -> str:
        """The category with the most bytes."""
        return max((field.name for field in dataclasses.fields(self)), key=lambda name: getattr(self, name))


@lru_cache(maxsize=64)
def parameter_counts(model: ModelConfig) -> tuple[int, int, int]:
    """Parameters of (one layer, embedding and positions, output projection).

    The layer is one after the first, dense layers. Embedding and positions include the final norm, and the output
    projection if it is tied.
    """
    model = model.later_layers
    one, two = (count_parameters(dataclasses.replace(model, layers=layers)) for layers in (1, 2))
    head = model.width * model.known_vocab_size
    outside = one - (two - one)
    return two - one, outside if model.tied else outside - head, head


class Count(NamedTuple):
    """Parameters of a stage or device.

    Attributes:
      layers: parameters of layers, without experts.
      experts: parameters of experts.
      outside: parameters of embedding, positions, final norm and output projection.
    """

    layers: float
    experts: float
    outside: float

    def over(self, devices: int) -> "Count":
        """The parameters of one of `devices` devices that share them evenly."""
        return Count(*(count / devices for count in self))

    def held(self, expert: int) -> float:
        """Parameters on one device of an axis `expert` of this size, not sharded over replicas."""
        return self.layers + self.experts / expert + self.outside


@lru_cache(maxsize=4096)
def stage_parameters(model: ModelConfig, layers: tuple[int, ...], first: bool, last: bool) -> Count:
    """Parameters of a stage with `layers` layers of each of `ModelConfig.layer_groups`.

    `first` and `last`: whether the stage has the embedding, and the output projection. A tied table is in both stages.
    """
    _, embedding, head = parameter_counts(model)
    dense = total = 0
    for (kind, _), count in zip(model.layer_groups, layers, strict=True):
        experts = count * (kind.experts or 0) * mlp_parameters(kind, kind.mlp_dim)
        dense, total = dense + count * parameter_counts(kind)[0] - experts, total + experts
    return Count(dense, total, first * embedding + (last and not (first and model.tied)) * head)


@lru_cache(maxsize=64)
def moment_rates(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[float, float]:
    """Bytes of optimizer state per parameter of (layers, all others), from the shapes of the state.

    The rate of the first, dense layers is taken to be that of the later layers.
    """
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
    """Bytes of optimizer state of `parameters`, before sharding over replicas."""
    if not request.style.native:
        return request.style.state_bytes[2] * sum(parameters)
    layers, outside = moment_rates(request.model, request.optimizer)
    return layers * (parameters.layers + parameters.experts) + outside * parameters.outside


def saved_values(request: PlanRequest, plan: PodPlan) -> dict[str, float]:
    """Elements per token and device of each value that a layer may save, by the names of `mstrain.planner.remat`."""
    model, tensor = request.model, plan.tensor
    wide = model.width / (tensor if plan.sequence_parallel else 1)
    into, out = attention_features(model)
    hidden, sent = hidden_features(model), 0.0
    if plan.expert > 1 and model.experts:  # rows of the token exchange, with their margin
        hidden += (MARGIN - 1) * model.mlp_dim * model.experts_per_token
        sent = MARGIN * model.experts_per_token * model.width / tensor
    scores = 0.0 if fused_attention(request) else SCORE_BYTES / request.element_bytes * model.heads * request.seq
    return {
        "input": wide, "qkv": into / tensor, "scores": scores / tensor, "context": out / tensor,
        "out": wide, "mlp_in": hidden * (2 if model.gated else 1) / tensor, "mlp_out": wide,
        "elementwise": 3 * wide + hidden / tensor + sent,
    }  # fmt: skip


def layer_bytes(request: PlanRequest, plan: PodPlan, tokens: int, remat: str) -> float:
    """Bytes of activations that one layer saves in device memory, for one microbatch on one device."""
    sizes, policy = saved_values(request, plan), parse_remat(remat)
    return request.element_bytes * tokens * sum(sizes[part] for part in policy.saved - policy.offloaded)


def deferred_bytes(request: PlanRequest, plan: PodPlan, tokens: int) -> float:
    """Bytes, besides `layer_bytes`, that deferred weight gradients of a layer need for one microbatch on one device.

    They are the gradients of the results of its products, and the inputs of products that only products can recompute
    (`mstrain.models.halves`).
    """
    sizes, policy = saved_values(request, plan), parse_remat(plan.remat)
    values = sizes["qkv"] + sizes["out"] + sizes["mlp_in"] + sizes["mlp_out"]
    values += 0.0 if policy.name == "none" else sizes["context"]
    values += sizes["out"] if policy.recomputes("out") else 0.0
    values += hidden_features(request.model) / plan.tensor if policy.recomputes("mlp_in") else 0.0
    return request.element_bytes * tokens * values


def gathered_table(head: Product) -> float:
    """Elements of the embedding table that one device all-gathers along the vocabulary; 0 if it has the whole table."""
    layout = head.layout
    count = layout.cols if layout.dataflow == "rs" else layout.rows
    entries = layout.projection.in_dim * layout.projection.out_dim
    return entries * count / (layout.rows * layout.cols) if count > 1 else 0.0


def loss_bytes(head: Product, size: int, platform: str = "tpu") -> tuple[float, float]:
    """Peak bytes of train.py's loss on one device: (a chunk of logits with its gradient, buffers of all chunks).

    The buffers of all chunks are the all-gathered operand that is not divided into chunks and its float32 gradient
    (`mstrain.layers.loss`). Where a GPU saves the gradients of all logits (`mstrain.layers.kept_loss`), they are these
    gradients, and the output projection with its gradient. `size` is the number of bytes of an activation.
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
    """Bytes of (weights, gradients, optimizer state) of one device.

    `parameters` are those of the device before sharding over replicas and over axis `expert`.
    """
    weights, gradients = (size * sum(parameters) for size in request.style.state_bytes[:2])
    held = parameters.held(plan.expert) / sum(parameters) if sum(parameters) else 1.0  # fraction left by axis `expert`
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
    """Bytes of saved activations of one layer of each group on one device.

    `held`: microbatches in flight, and microbatches with deferred weight gradients.
    """
    return [
        layer_bytes(kind, plan, tokens, plan.remat) * held[0] + deferred_bytes(kind, plan, tokens) * held[1]
        for kind, _ in request.layer_groups
    ]


def stage_memory(request: PlanRequest, products: Products, plan: PodPlan, stage: Stage) -> Memory:
    """Memory of a device of a stage.

    If the chunks of a stage differ, the activations of each are taken to be those of the largest; in lockstep, the
    weights too.
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
    if plan.shard == "parameters":  # all-gathered: two consecutive layers, and the first, dense layers
        ready = stage_parameters(model, (*layers[:-1], 2), False, False)
        gathered += size * ready.over(tensor).held(plan.expert)
    whole = 0.0 if plan.remat == "none" else max(layer_bytes(kind, plan, tokens, "none") for kind, _ in kinds)
    moments, waiting = [gathered + whole], 0.0  # workspace at several times; first: a layer's backward pass
    if lockstep:
        again = sum(map(operator.mul, counts[:-1], held_bytes(request, plan, tokens, (1, 0))))
        moments.append(gathered + whole + again)
    ahead = plan.microbatches if plan.schedule == "gpipe" else 1  # microbatches between the passes of the last stage
    if last:  # in lockstep, every stage has a buffer for each gradient of the last activations
        kept += size * model.width * tokens / tensor * (stage.in_flight * len(chunks) if lockstep else ahead)
        if request.style.native:  # computed in chunks in both passes
            moments.append(sum(loss_bytes(products.head, size, request.pod.chip.platform)))
        else:  # logits with a float32 copy between their passes, and the gradient of one microbatch's logits
            logits = tokens * products.head.layout.projection.out_dim / tensor
            waiting = (size + 4) * logits * (ahead - 1)
            moments.append(gathered + (2 * size + 4) * logits)
    table = gathered_table(products.head) if first else 0.0  # all-gathered during the whole step, for lookups
    if first:  # its gradient is computed after the activations of the microbatch are freed
        moments.append(WEIGHT_BYTES * table - kept / stage.in_flight)
    return Memory(*state, kept, max(moments) + waiting + size * table)
