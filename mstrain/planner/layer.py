"""Seconds of the parts of a layer and of the output projection on one device, per microbatch.

The time of a matrix product follows from its shape (`mstrain.hardware.efficiency`), that of its collectives from
`mstrain.parallel.product_cost`. MeshSlice overlaps its slices (paper section 3.2.2). The hidden fractions of the other
collectives of train.py are those of compiled steps with the same algorithm (`mstrain.hardware.overlap`); for other
systems the execution style states which collectives are hidden. The times of element-wise work and attention follow
from the bytes and FLOPs of the execution style.
"""

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from mstrain.gemm.expert_exchange import MARGIN
from mstrain.hardware import collective_seconds
from mstrain.hardware.constants import Constants
from mstrain.hardware.efficiency import product_seconds
from mstrain.hardware.expert_links import exchange_link
from mstrain.hardware.overlap import Hidden, hidden_shares
from mstrain.hardware.pod import Links, Pod
from mstrain.layers.attention_kernels import CUDNN_WIDEST_HEAD
from mstrain.models.config import ModelConfig
from mstrain.models.products import attention_features, hidden_features
from mstrain.parallel.exchange import Exchange, join_seconds
from mstrain.parallel.gemms import gemm_times, gemms_of, local_dims
from mstrain.parallel.product_cost import communication_terms, pass_costs
from mstrain.parallel.token_exchange import TokenExchange
from mstrain.planner.execution import ExecutionStyle
from mstrain.planner.experts import grouped_seconds, router_seconds
from mstrain.planner.plan import PodPlan, Product, Products
from mstrain.planner.remat import Remat
from mstrain.planner.request import PlanRequest

FLASH_BLOCK = 128  # tokens; train.py uses a fused kernel for 16-bit sequences of a multiple of this length
# Tokens per block: a causal kernel computes whole blocks. GPUs: fitted to the slowdown at 512 to 4096 tokens of Shah et
# al., 2024, figure 5.
FUSED_BLOCK = {"gpu": 256, "tpu": 1024, "cpu": 128}
FUSED_BACKWARD = 2.5  # FLOPs of a fused attention kernel's backward pass over those of its forward pass
HIDDEN_PART = 0.8  # fraction of a TPU's compute time that can hide a collective; both use memory bandwidth
SLOWED = 0.16  # overlapping GPU compute, 18.9 % slower, loses this fraction of the collective's time (Lee et al., 2025)
PIECES = (
    ("elementwise", "elementwise"), ("attention in", "qkv"), ("queries in", "qkv"), ("keys in", "qkv"),
    ("attention", "context"), ("attention out", "out"), ("elementwise", "elementwise"), ("mlp in", "mlp_in"),
    ("shared in", "mlp_in"), ("elementwise", "elementwise"), ("mlp out", "mlp_out"), ("shared out", "mlp_out"),
    ("elementwise", "input"),
)  # fmt: skip
"""(operation, value that it computes) for all operations of a layer in order; values are parts of
`mstrain.planner.remat`. A model's layer has a subset of the products."""
MADE = dict(PIECES)


class Pass(NamedTuple):
    """Seconds of one pass of one microbatch on one device, by kind of work.

    `exposed` is exposed communication of matrix products, `context` that of attention over split sequences.
    """

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
    """Times of one microbatch in one layer (the mean over a group of layers) and in output projection and loss.

    Attributes:
      forward, backward: passes of the layer, without recomputation.
      products: forward passes of the layer's matrix products by name.
      head_forward, head_backward: passes of the output projection and the loss.
      weights: seconds of the weight gradients (in the layer, in the output projection).
      exchange: seconds of exposed exchange of expert tokens in the layer's (forward, backward) pass; `forward.exposed`
        and `backward.exposed` include them.
    """

    forward: Pass
    backward: Pass
    products: tuple[tuple[str, Pass], ...]
    head_forward: Pass
    head_backward: Pass
    weights: tuple[float, float]
    exchange: tuple[float, float] = (0.0, 0.0)

    def repeated(self, remat: Remat, style: ExecutionStyle, fused: bool) -> frozenset[str]:
        """What the backward pass of a layer recomputes: names of products, "attention", "elementwise"."""
        again = {name for name, _ in self.products if remat.recomputes(MADE[name])}
        if style.dead_code:  # no gradient needs the results of the last products
            again -= {"mlp out", "shared out"}
        scores = remat.recomputes("context" if fused else "scores")
        again |= {name for name, runs in (("attention", scores), ("elementwise", remat.elementwise)) if runs}
        return frozenset(again)

    def recomputed(self, again: frozenset[str]) -> Pass:
        """Time of recomputing `again`, a result of `repeated`, in one layer."""
        repeated = sum((work for name, work in self.products if name in again), Pass())
        if "elementwise" in again:  # this includes the element-wise work of products
            repeated = repeated._replace(elementwise=self.forward.elementwise)
        if "attention" in again:
            repeated = repeated._replace(attention=self.forward.attention, context=self.forward.context)
        return repeated


def fused_attention(request: PlanRequest) -> bool:
    """Whether a fused kernel computes attention; it saves no scores and skips most of the masked ones."""
    if not request.style.fused_attention or not request.style.native:
        return request.style.fused_attention
    model, seq = request.model, request.seq
    extras = model.position == "alibi"
    if request.pod.chip.platform == "gpu":
        extras |= model.attention_sinks or (model.window is not None and model.window < seq)
        extras |= model.head_dim > CUDNN_WIDEST_HEAD or model.head_dim != model.value_dim
    return not extras and request.element_bytes == 2 and model.head_dim % 8 == 0 and seq % FLASH_BLOCK == 0


def exposed_beside(collective: float, compute: float, platform: str) -> float:
    """Exposed seconds of a collective that overlaps with `compute` seconds of compute.

    On GPUs both use SMs and memory (Lee et al., 2025, Characterizing Compute-Communication Overlap).
    """
    if platform == "gpu":
        return max(collective - compute, SLOWED * collective)
    return max(0.0, collective - HIDDEN_PART * compute)


def elementwise_values(model: ModelConfig, style: ExecutionStyle, columns: int) -> tuple[float, float]:
    """Values per token that element-wise work of a layer's forward pass reads or writes.

    Returns those of (norms and residuals, attention heads and MLP); `columns` is the number of mesh columns.
    """
    around = style.width_passes + (style.column_passes if columns > 1 else 0.0)
    around *= model.width * (0.6 if model.parallel_block else 1.0)
    passes = style.mlp_passes * hidden_features(model) * (1.5 if model.gated else 1.0)
    return around, style.head_passes * sum(attention_features(model)) + passes


@dataclass(frozen=True)
class Setting:
    """Everything that determines the times of products and kernels, which are cached by it, with rates and links.

    Attributes:
      fused: whether a fused kernel computes attention.
      sizes: sizes of the (stage, data, context, row, col) axes of the plan.
      expert: number of replicas over which experts are sharded, a divisor of data.
    """

    model: ModelConfig
    style: ExecutionStyle
    pod: Pod
    seq: int
    dtype: str
    element_bytes: int
    fused: bool
    sizes: tuple[int, ...]
    sequence_parallel: bool
    expert: int = 1

    @property
    def tensor(self) -> int:
        return math.prod(self.sizes[3:])

    @cached_property
    def constants(self) -> Constants:
        return self.pod.constants(self.sizes, self.dtype)

    @cached_property
    def links(self) -> Links:
        return self.pod.links(self.sizes, self.dtype)

    @cached_property
    def memory_bandwidth(self) -> float:
        return self.pod.memory_bandwidth(self.constants)

    @cached_property
    def elementwise_bandwidth(self) -> float:
        return self.pod.elementwise_bandwidth(self.constants, self.style.native)

    def product_seconds(self, dims) -> float:
        """Seconds of a product with `dims` (rows, contracted dim, columns) on one device."""
        return product_seconds(self.pod.chip, self.constants, dims, self.dtype)

    def rates(self, product: Product) -> tuple[tuple[float, ...], Constants]:
        """(seconds of each of the three GEMMs on one device, constants with their mean FLOP/s and the links used)."""
        layout = product.layout
        times, flops = gemm_times(layout, product.slices, self.product_seconds)
        if grouped := _grouped_times(self, product):
            times, flops = grouped, flops * (sum(times) / sum(grouped))
        return times, replace(self.constants, flops=flops).along(layout.rows, layout.cols, product.turned)


def setting_of(request: PlanRequest, plan: PodPlan) -> Setting:
    """The setting of a plan."""
    return Setting(
        request.model, request.style, request.pod, request.seq, request.dtype, request.element_bytes,
        fused_attention(request), plan.sizes, plan.sequence_parallel, plan.expert,
    )  # fmt: skip


def layer_works(request: PlanRequest, plan: PodPlan, products: Products) -> tuple[Work, ...]:
    """The times of a layer of each group of `PlanRequest.layer_groups`."""
    kinds = zip(request.layer_groups, products.kinds, strict=True)
    return tuple(_work(setting_of(kind, plan), each) for (kind, _), each in kinds)


@lru_cache(maxsize=1 << 14)
def _work(at: Setting, products: Products) -> Work:
    model, style, tensor, bandwidth = at.model, at.style, at.tensor, at.elementwise_bandwidth
    launch = at.pod.efficiency.launch if at.pod.derived else 0.0
    around, inside = elementwise_values(model, style, products.block[0].layout.cols)
    nbytes = at.element_bytes * products.tokens * (around / (tensor if at.sequence_parallel else 1) + inside / tensor)
    moved = nbytes / bandwidth + style.kernels * launch
    ahead, behind = _attention(at, products.tokens)
    waits = _exchange(at, products, ahead, behind)
    forward = Pass(0.0, 0.0, ahead, moved, waits[0])
    backward = Pass(0.0, 0.0, behind, style.backward_passes * moved, waits[1])
    each, weights = {}, 0.0
    for block, share in products.groups:
        for product, (first, second, weight) in zip(block, _block_passes(at, block)):
            each[product.name] = each.get(product.name, Pass()) + first * share
            backward, weights = backward + second * share, weights + weight * share
    exchange = 0.0, 0.0
    if model.experts:
        backward, exchange = _with_experts(at, products, each, backward)
    forward = sum(each.values(), forward)
    first, second, weight = _block_passes(at, (products.head,))[0]
    columns = products.head.layout.projection.out_dim / tensor
    if style.one_hot:
        lookup = at.product_seconds((products.tokens, columns, model.width))
        table = at.product_seconds((columns, products.tokens, model.width))
        first, second, weight = first + Pass(lookup), second + Pass(table), weight + table
    loss = Pass(elementwise=style.logit_bytes / 2 * products.tokens * columns / bandwidth)
    if style.native:  # the backward pass of the loss recomputes the logits
        second = second + first
    return Work(forward, backward, tuple(each.items()), first + loss, second + loss, (weights, weight), exchange)


def _exchange(at: Setting, products: Products, ahead: float, behind: float) -> tuple[float, float]:
    """Exposed seconds that the exchange of keys and values adds to the (forward, backward) pass of attention.

    Sequences are split over axis `context`, or also over rows; 0 without a split.
    """
    if products.parts == 1:
        return 0.0, 0.0
    model, links, size = at.model, at.links, at.element_bytes
    kv = products.tokens * model.num_kv_heads * (model.head_dim + model.value_dim) / at.tensor
    axis = links.context if products.parts == at.sizes[2] else links.row
    if not at.style.native:
        ring = collective_seconds(axis.all_gather, kv * size, products.parts)
        platform = at.pod.chip.platform
        return exposed_beside(ring, ahead, platform), exposed_beside(2 * ring, behind, platform)
    waits = Exchange(products.parts, kv, size, ahead).seconds(products.exchange, axis)
    values = products.tokens * model.heads * model.value_dim / at.tensor
    joins = join_seconds(products.parts, values, kv, at.memory_bandwidth)
    return waits[0] + joins[0], waits[1] + joins[1]


def _block_passes(at: Setting, block: tuple[Product, ...]) -> list[tuple[Pass, Pass, float]]:
    """(forward pass, backward pass, seconds of the weight gradient) of each product of a layer."""
    found, sums = [], []
    for product in block:
        layout = product.layout
        times, rate = at.rates(product)
        if at.style.native:
            hidden = hidden_shares(at.pod.chip.name, product.program)
            ahead, behind = (Pass(c.compute, c.exposed) for c in pass_costs(layout, product.slices, rate, hidden))
        else:
            ahead, behind = Pass(times[0]), Pass(times[1] + times[2])
            terms = communication_terms(layout, rate)
            ways = [t.traffic_col + t.latency_col for t in terms if t.gemm in ("OS", "LS")]
            sums.append(sum(ways) if product.name != "output" and layout.dataflow == "ls" else 0.0)
        moved = _sorting(at, product)
        moved += layout.copied_bytes() / at.elementwise_bandwidth if product.slices > 1 else 0.0
        found.append((ahead + Pass(elementwise=moved), behind + Pass(elementwise=2 * moved), times[2]))
    return _with_sums(at, found, sums) if any(sums) else found


def _grouped_times(at: Setting, product: Product) -> tuple[float, ...]:
    """Seconds of the three grouped products of all experts of one device.

    Empty where no grouped kernel computes them, or where rates do not follow from shapes.
    """
    shaped = at.constants.shaped and not at.constants.gemm
    if not (at.model.experts and product.name.startswith("mlp") and shaped and at.pod.chip.platform == "tpu"):
        return ()
    layout, experts = product.layout, product.layout.projection.experts
    dims = ((gemm.kind, local_dims(gemm, layout.rows, layout.cols, product.slices)) for gemm in gemms_of(layout))
    return tuple(
        product.slices
        * grouped_seconds(at.pod, at.memory_bandwidth, each, experts, kind, at.dtype, at.style.expert_tile)
        for kind, each in dims
    )


def _with_experts(
    at: Setting, products: Products, each: dict[str, Pass], backward: Pass
) -> tuple[Pass, tuple[float, float]]:
    """Adds the router and the exchange of expert tokens to both passes of a layer.

    Updates the forward passes of `each` product in place. Returns the backward pass, and the exposed seconds of the
    exchange in the (forward, backward) pass.
    """
    router = router_seconds(at.model, products.tokens, at.tensor, at.constants.flops)
    each["mlp in"] += Pass(elementwise=router)
    backward += Pass(elementwise=2 * router)
    if at.expert == 1:
        return backward, (0.0, 0.0)
    link = exchange_link(at.pod, at.sizes, at.expert)
    sent = at.element_bytes * products.tokens * at.model.experts_per_token * at.model.width / at.tensor
    under = sum(each[name].gemm for name in ("mlp in", "mlp out"))
    layouts = [product.layout for product in products.block if product.name.startswith("mlp")]
    values = sum(layout.projection.experts * layout.projection.in_dim * layout.projection.out_dim for layout in layouts)
    weights = at.element_bytes * values / at.tensor  # all-gathered along the rows
    gather = collective_seconds(at.links.row.all_gather, weights, layouts[0].rows)
    way, add = MARGIN * sent / link.bandwidth, 3 * weights / at.memory_bandwidth
    exchange = TokenExchange(way, link.launch + link.sync, under, gather, add)
    forward, behind = exchange.seconds(products.expert_slices)
    copied = at.style.sent_passes * sent / at.elementwise_bandwidth
    for name in ("mlp in", "mlp out"):
        each[name] += Pass(exposed=forward / 2, elementwise=copied / 2)
    return backward + Pass(exposed=behind, elementwise=2 * copied), (forward, behind)


def _sorting(at: Setting, product: Product) -> float:
    """Seconds to copy and sort all-gathered tokens by expert, or to sum them up; 0 for a dense weight."""
    layout, projection = product.layout, product.layout.projection
    if projection.rows == 1:
        return 0.0
    width = projection.in_dim if projection.rows_in == 1 else projection.out_dim
    read_and_written = at.style.sorted_passes * (1 + projection.rows) * layout.tokens / layout.rows * width
    return read_and_written * at.element_bytes / at.memory_bandwidth


def _with_sums(at: Setting, found: list[tuple[Pass, Pass, float]], sums: list[float]):
    """Adds the sum over the tensor-parallel devices after attention and after the MLP, in both passes.

    `found` is the result of `_block_passes`, `sums` the seconds of the sum after each product (0 for none).
    """
    sums = [each / (2 if at.model.parallel_block else 1) for each in sums]
    parts = [1.0, 1.0]
    if "tensor" in at.style.hides and at.pod.chip.platform == "tpu":  # a sum is a reduce_scatter and an all_gather
        shares = hidden_shares(at.pod.chip.name, "megatron") or (Hidden(), Hidden())
        parts = [1 - (share.all_gather + share.reduce_scatter) / 2 for share in shares]
    elif "tensor" in at.style.hides:
        weights = sum(weight for *_, weight in found)
        parts[1] = exposed_beside(sum(sums), weights, "gpu") / sum(sums)
    return [
        (ahead + Pass(exposed=each * parts[0]), behind + Pass(exposed=each * parts[1]), weight)
        for (ahead, behind, weight), each in zip(found, sums)
    ]


def _attention(at: Setting, tokens: int) -> tuple[float, float]:
    """Seconds of the (forward, backward) pass of attention without its projections."""
    model, pod, constants, seq, context = at.model, at.pod, at.constants, at.seq, at.sizes[2]
    heads = model.heads / at.tensor  # may be a fraction with FSDP, whose devices divide sequences instead of heads
    heads = heads if at.style.native else math.ceil(heads)
    if at.fused:
        block = min(FUSED_BLOCK[pod.chip.platform], seq)
        # TPU kernels pad values to head_dim.
        wide = model.head_dim if pod.chip.platform == "tpu" else (model.head_dim + model.value_dim) / 2
        attended, local = (seq + block) / 2, sum(model.is_local) / model.layers
        if model.window is not None:
            attended = (1 - local) * attended + local * min(model.window + block, attended)
        flops = 4.0 * tokens * attended * heads * wide
        if not constants.shaped:
            return flops / constants.flops, FUSED_BACKWARD * flops / constants.flops
        rate = pod.efficiency.attention_rate(pod.chip, model.head_dim, at.dtype, at.style.flash2) * at.style.attention
        forward = flops / rate
        return forward, FUSED_BACKWARD * forward
    sequences, queries = tokens * context / seq, seq // context
    count, dims = sequences * heads, (queries, model.head_dim, seq)
    results = (queries, seq, model.value_dim)
    both = 2.0 * (math.prod(dims) + math.prod(results)) * count / constants.flops
    if constants.shaped and not constants.gemm:
        both = sum(pod.efficiency.gemm_seconds(pod.chip, each, at.dtype, math.ceil(count)) for each in (dims, results))
    scores = count * queries * seq * at.element_bytes / at.memory_bandwidth
    ahead, behind = (passes * scores for passes in at.style.score_passes)
    return both + ahead, 2 * both + behind
