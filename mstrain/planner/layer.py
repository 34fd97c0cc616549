"""Seconds of the parts of a layer and of the output projection on one device, per microbatch.

Products cost what their shapes do (`mstrain.hardware.efficiency`), their collectives what
`mstrain.parallel.product_cost` says: MeshSlice overlaps its slices (paper section 3.2.2), and of the other collectives
of train.py is hidden what compiled steps of that algorithm hide (`mstrain.hardware.overlap`). Other systems hide what
their execution style says. Element-wise work and attention cost what the style moves and computes.
"""

import math
import operator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mstrain.hardware import collective_seconds
from mstrain.hardware.constants import Constants
from mstrain.hardware.gemm_times import gemm_seconds
from mstrain.hardware.overlap import hidden_shares
from mstrain.models.config import ModelConfig
from mstrain.parallel.product_cost import communication_terms, pass_costs
from mstrain.planner.execution import ExecutionStyle
from mstrain.planner.plan import PodPlan, Product, Products
from mstrain.planner.products import gemms_of, local_dims
from mstrain.planner.remat import Remat
from mstrain.planner.request import PlanRequest
from mstrain.planner.target import Pod

FLASH_BLOCK = 128  # tokens; sequences of whole blocks in 16 bits use a kernel that skips what is masked
FUSED_BLOCK = {"gpu": 128, "tpu": 1024, "cpu": 128}  # tokens; a causal kernel visits whole blocks
FUSED_BACKWARD = 2.5  # products of a fused attention kernel's backward pass over those of its forward pass
HIDDEN_PART = 0.8  # of the product that a collective runs under: both use memory and, on GPUs, SMs
PARTS = {"attention in": "qkv", "attention out": "out", "mlp in": "mlp_in", "mlp out": "mlp_out"}
"""Names of `mstrain.planner.remat` of what the products of a block leave."""


class Pass(NamedTuple):
    """Seconds of one pass of one microbatch through some layers on one device; `exposed` and `context` are waits."""

    gemm: float = 0.0
    exposed: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    context: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def __add__(self, other) -> "Pass":
        return Pass(*map(operator.add, self, other))

    def __mul__(self, times) -> "Pass":
        return Pass(*(times * value for value in self))


@dataclass(frozen=True)
class Work:
    """One microbatch through one layer (the mean over all), and through the output projection with its loss.

    `products` are the forward passes of the layer's products by name; `weights` seconds of the products that make the
    gradients of weights, in a layer and in the projection.
    """

    forward: Pass
    backward: Pass
    products: tuple[tuple[str, Pass], ...]
    head_forward: Pass
    head_backward: Pass
    weights: tuple[float, float]

    def recomputed(self, remat: Remat, style: ExecutionStyle, fused: bool) -> Pass:
        """What the backward pass of a layer computes again."""
        again = [name for name, _ in self.products if remat.recomputes(PARTS[name])]
        if style.dead_code:  # only the sum behind it needs the last product
            again = [name for name in again if name != "mlp out"]
        repeated = sum((work for name, work in self.products if name in again), Pass())
        scores = remat.recomputes("context") if fused else remat.recomputes("scores")
        return repeated + Pass(
            attention=self.forward.attention if scores else 0.0,
            elementwise=self.forward.elementwise if remat.elementwise else 0.0,
            context=self.forward.context if scores else 0.0,
        )


def fused_attention(request: PlanRequest) -> bool:
    """Whether one kernel computes attention, which keeps no scores and skips most of what is masked."""
    if not request.style.fused_attention or not request.style.native:
        return request.style.fused_attention
    model, seq = request.model, request.seq
    extras = model.position == "alibi" or (model.window is not None and model.window < seq)
    return not extras and request.element_bytes == 2 and model.head_dim % 8 == 0 and seq % FLASH_BLOCK == 0


def elementwise_values(model: ModelConfig, style: ExecutionStyle) -> tuple[float, float]:
    """Values per token that a layer reads or writes beside products, forward: (norms and residuals, the rest)."""
    around = style.width_passes * model.width * (0.6 if model.parallel_block else 1.0)
    heads = (2 * model.heads + 2 * model.num_kv_heads) * model.head_dim
    return around, style.head_passes * heads + style.mlp_passes * model.mlp_dim * (1.5 if model.gated else 1.0)


def layer_work(request: PlanRequest, plan: PodPlan, products: Products) -> Work:
    """Work of a layer and of the output projection under a plan."""
    return _work(
        request.model, request.style, request.pod, request.seq, request.dtype, request.element_bytes,
        fused_attention(request), plan.sizes, plan.sequence_parallel, products,
    )  # fmt: skip


@lru_cache(maxsize=1 << 14)
def _work(
    model: ModelConfig, style: ExecutionStyle, pod: Pod, seq: int, dtype: str, size: int, fused: bool,
    sizes: tuple[int, ...], sequence_parallel: bool, products: Products,
) -> Work:  # fmt: skip
    tensor, constants, links = math.prod(sizes[3:]), pod.constants(sizes, dtype), pod.links(sizes, dtype)
    bandwidth, launch = pod.device(constants).memory_bandwidth, pod.efficiency.launch if pod.derived else 0.0
    around, inside = elementwise_values(model, style)
    nbytes = size * products.tokens * (around / (tensor if sequence_parallel else 1) + inside / tensor)
    moved = nbytes / bandwidth + style.kernels * launch
    ahead, behind = _attention(
        model, style, pod, constants, dtype, fused, (products.tokens, seq, sizes[2], tensor, size)
    )
    kv = 2 * model.num_kv_heads * model.head_dim / tensor * products.tokens * size
    ring = collective_seconds(links.context.all_gather, kv, sizes[2])
    waits = (max(0.0, ring - HIDDEN_PART * ahead), max(0.0, 2 * ring - HIDDEN_PART * behind))
    forward = Pass(0.0, 0.0, ahead, moved, waits[0])
    backward = Pass(0.0, 0.0, behind, style.backward_passes * moved, waits[1])
    each, weights = {}, 0.0
    for block, share in products.groups:
        for product, (first, second, weight) in zip(block, _block_passes(block, model, style, pod, constants, dtype)):
            each[product.name] = each.get(product.name, Pass()) + first * share
            backward, weights = backward + second * share, weights + weight * share
    forward = sum(each.values(), forward)
    first, second, weight = _block_passes((products.head,), model, style, pod, constants, dtype)[0]
    columns = products.head.layout.projection.out_dim / tensor
    if style.one_hot:
        lookup, _, table = _gemm_seconds((products.tokens, columns, model.width), pod, constants, dtype)
        first, second, weight = first + Pass(lookup), second + Pass(table), weight + table
    loss = Pass(elementwise=style.logit_bytes / 2 * products.tokens * columns / bandwidth)
    return Work(forward, backward, tuple(each.items()), first + loss, second + loss, (weights, weight))


def _gemm_seconds(dims, pod: Pod, constants: Constants, dtype: str) -> tuple[float, float, float]:
    """Of a product of (tokens, in, out) on one device: forward, its input's gradient and its weight's."""
    tokens, fan_in, fan_out = dims
    shapes = ((tokens, fan_in, fan_out), (tokens, fan_out, fan_in), (fan_in, tokens, fan_out))
    forward, inputs, weights = (_one(each, pod, constants, dtype) for each in shapes)
    return forward, inputs, weights


def _one(dims: tuple[int, int, int], pod: Pod, constants: Constants, dtype: str) -> float:
    if constants.gemm:
        return gemm_seconds(constants.gemm, *dims)
    if constants.shaped:
        return pod.efficiency.gemm_seconds(pod.chip, dims, dtype)
    return 2.0 * math.prod(dims) / constants.flops


def _block_passes(block: tuple[Product, ...], model: ModelConfig, style: ExecutionStyle, pod: Pod, constants, dtype):
    """(forward, backward, seconds of the weight's gradient) of every product of a block."""
    found, sums = [], []
    for product in block:
        layout, gemms = product.layout, gemms_of(product)
        dims = [local_dims(gemm, layout.rows, layout.cols, product.slices) for gemm in gemms]
        times = [product.slices * _one(each, pod, constants, dtype) for each in dims]
        rate = replace(constants, flops=product.slices * sum(2.0 * math.prod(each) for each in dims) / sum(times))
        rate = rate.along(layout.rows, layout.cols, product.turned)
        if style.native:
            hidden = hidden_shares(pod.chip.name, product.algorithm)
            ahead, behind = (Pass(c.compute, c.exposed) for c in pass_costs(layout, product.slices, rate, hidden))
        else:
            ahead, behind = Pass(times[0]), Pass(times[1] + times[2])
            terms = communication_terms(layout, rate)
            ways = [t.traffic_col + t.latency_col for t in terms if t.gemm in ("OS", "LS")]
            sums.append(sum(ways) if product.name != "output" and layout.dataflow == "ls" else 0.0)
        found.append((ahead, behind, times[2]))
    if any(sums):
        return _with_sums(found, sums, model, style, pod)
    return found


def _with_sums(found, sums, model: ModelConfig, style: ExecutionStyle, pod: Pod):
    """Adds the sum over the tensor devices behind each half of a block, and the same in the backward pass."""
    sums = [each / (2 if model.parallel_block else 1) for each in sums]
    hides = "tensor" in style.hides
    under = sum(ahead.gemm for ahead, *_ in found) if hides and pod.chip.platform == "tpu" else 0.0
    weights = sum(weight for *_, weight in found) if hides else 0.0
    parts = [1 - min(1.0, HIDDEN_PART * seconds / sum(sums)) for seconds in (under, weights)]
    return [
        (ahead + Pass(exposed=each * parts[0]), behind + Pass(exposed=each * parts[1]), weight)
        for (ahead, behind, weight), each in zip(found, sums)
    ]


def _attention(
    model: ModelConfig, style: ExecutionStyle, pod: Pod, constants: Constants, dtype: str, fused: bool, sizes
) -> tuple[float, float]:  # fmt: skip
    """Forward and backward pass of the attention between the projections."""
    tokens, seq, context, tensor, size = sizes
    heads = model.heads / tensor if style.native else math.ceil(model.heads / tensor)  # FSDP splits sequences instead
    if fused:
        block = min(FUSED_BLOCK[pod.chip.platform], seq)
        flops = 4.0 * tokens * seq * (1 + block / seq) / 2 * heads * model.head_dim
        if not constants.shaped:
            return flops / constants.flops, FUSED_BACKWARD * flops / constants.flops
        forward = flops / pod.efficiency.attention_rate(pod.chip, model.head_dim, dtype)
        return forward, FUSED_BACKWARD * forward
    sequences, queries = tokens * context / seq, seq // context
    count, dims = sequences * heads, (queries, model.head_dim, seq)
    both = 2 * 2.0 * math.prod(dims) * count / constants.flops
    if constants.shaped and not constants.gemm:
        both = sum(
            pod.efficiency.gemm_seconds(pod.chip, each, dtype, math.ceil(count))
            for each in (dims, (queries, seq, model.head_dim))
        )
    scores = count * queries * seq * size / pod.device(constants).memory_bandwidth
    ahead, behind = (passes * scores for passes in style.score_passes)
    return both + ahead, 2 * both + behind
