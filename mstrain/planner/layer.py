"""Seconds of the parts of a layer and of the output projection on one device, per microbatch.

Products cost what their shapes do (`mstrain.hardware.efficiency`), their collectives what
`mstrain.parallel.product_cost` says: MeshSlice overlaps its slices (paper section 3.2.2), and of the other collectives
of train.py is hidden what compiled steps of that algorithm hide (`mstrain.hardware.overlap`). Other systems hide what
their execution style says. Element-wise work and attention cost what the style moves and computes.
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

FLASH_BLOCK = 128  # tokens; sequences of whole blocks in 16 bits use a kernel that skips what is masked
# Tokens: a causal kernel visits whole blocks; on GPUs from losses at 512 to 4096 tokens (Shah et al., 2024, figure 5).
FUSED_BLOCK = {"gpu": 256, "tpu": 1024, "cpu": 128}
FUSED_BACKWARD = 2.5  # products of a fused attention kernel's backward pass over those of its forward pass
HIDDEN_PART = 0.8  # of the product that a collective of a TPU runs under: both use memory
SLOWED = 0.16  # of a collective's time is lost by what a GPU computes beside it, 18.9 % slower (Lee et al., 2025)
PIECES = (
    ("elementwise", "elementwise"), ("attention in", "qkv"), ("queries in", "qkv"), ("keys in", "qkv"),
    ("attention", "context"), ("attention out", "out"), ("elementwise", "elementwise"), ("mlp in", "mlp_in"),
    ("shared in", "mlp_in"), ("elementwise", "elementwise"), ("mlp out", "mlp_out"), ("shared out", "mlp_out"),
    ("elementwise", "input"),
)  # fmt: skip
"""Of a layer, in order, each with what it makes, in the words of `mstrain.planner.remat`; a layer has those products
that its model has."""
MADE = dict(PIECES)


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
    """One microbatch through one layer (the mean over all of a kind), and through the output projection with its loss.

    `products` are the forward passes of the layer's products by name; `weights` seconds of the products that make the
    gradients of weights, in a layer and in the projection. `exchange` is what is waited for tokens of experts in either
    pass of a layer, among what the passes expose.
    """

    forward: Pass
    backward: Pass
    products: tuple[tuple[str, Pass], ...]
    head_forward: Pass
    head_backward: Pass
    weights: tuple[float, float]
    exchange: tuple[float, float] = (0.0, 0.0)

    def repeated(self, remat: Remat, style: ExecutionStyle, fused: bool) -> frozenset[str]:
        """What the backward pass of a layer computes again: names of products, "attention", "elementwise"."""
        again = {name for name, _ in self.products if remat.recomputes(MADE[name])}
        if style.dead_code:  # only the sum behind them needs the last products
            again -= {"mlp out", "shared out"}
        scores = remat.recomputes("context" if fused else "scores")
        again |= {name for name, runs in (("attention", scores), ("elementwise", remat.elementwise)) if runs}
        return frozenset(again)

    def recomputed(self, again: frozenset[str]) -> Pass:
        repeated = sum((work for name, work in self.products if name in again), Pass())
        if "elementwise" in again:  # with that of products
            repeated = repeated._replace(elementwise=self.forward.elementwise)
        if "attention" in again:
            repeated = repeated._replace(attention=self.forward.attention, context=self.forward.context)
        return repeated


def fused_attention(request: PlanRequest) -> bool:
    """Whether one kernel computes attention, which keeps no scores and skips most of what is masked."""
    if not request.style.fused_attention or not request.style.native:
        return request.style.fused_attention
    model, seq = request.model, request.seq
    extras = model.position == "alibi"
    if request.pod.chip.platform == "gpu":
        extras |= model.attention_sinks or (model.window is not None and model.window < seq)
        extras |= model.head_dim > CUDNN_WIDEST_HEAD or model.head_dim != model.value_dim
    return not extras and request.element_bytes == 2 and model.head_dim % 8 == 0 and seq % FLASH_BLOCK == 0


def exposed_beside(collective: float, compute: float, platform: str) -> float:
    """Seconds that a collective adds to the compute that it runs beside.

    On GPUs both use SMs and memory: Lee et al., 2025, Characterizing Compute-Communication Overlap.
    """
    if platform == "gpu":
        return max(collective - compute, SLOWED * collective)
    return max(0.0, collective - HIDDEN_PART * compute)


def elementwise_values(model: ModelConfig, style: ExecutionStyle, columns: int) -> tuple[float, float]:
    """Values per token that a layer reads or writes beside products, forward: (norms and residuals, the rest)."""
    around = style.width_passes + (style.column_passes if columns > 1 else 0.0)
    around *= model.width * (0.6 if model.parallel_block else 1.0)
    passes = style.mlp_passes * hidden_features(model) * (1.5 if model.gated else 1.0)
    return around, style.head_passes * sum(attention_features(model)) + passes


@dataclass(frozen=True)
class Setting:
    """What decides the time of products and kernels: the key of their cache; and the rates and links that follow.

    Attributes:
      fused: whether one kernel computes attention.
      sizes: of the (stage, data, context, row, col) axes of the plan; `expert`: parts of data that divide experts.
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
        """Of a product of (rows, summed, columns) on one device."""
        return product_seconds(self.pod.chip, self.constants, dims, self.dtype)

    def rates(self, product: Product) -> tuple[tuple[float, ...], Constants]:
        """(seconds of its three GEMMs on one device, the mean rate of them and the links of its rows and columns)."""
        layout = product.layout
        times, flops = gemm_times(layout, product.slices, self.product_seconds)
        if grouped := _grouped_times(self, product):
            times, flops = grouped, flops * (sum(times) / sum(grouped))
        return times, replace(self.constants, flops=flops).along(layout.rows, layout.cols, product.turned)


def setting_of(request: PlanRequest, plan: PodPlan) -> Setting:
    return Setting(
        request.model, request.style, request.pod, request.seq, request.dtype, request.element_bytes,
        fused_attention(request), plan.sizes, plan.sequence_parallel, plan.expert,
    )  # fmt: skip


def layer_works(request: PlanRequest, plan: PodPlan, products: Products) -> tuple[Work, ...]:
    """Of a layer of every group of `PlanRequest.layer_groups`."""
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
    if style.native:  # the loss computes its logits again
        second = second + first
    return Work(forward, backward, tuple(each.items()), first + loss, second + loss, (weights, weight), exchange)


def _exchange(at: Setting, products: Products, ahead: float, behind: float) -> tuple[float, float]:
    """Seconds that attention adds to each pass where sequences are split, by axis `context` or also by rows."""
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
    """(forward, backward, seconds of the weight's gradient) of every product of a block."""
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
    """Seconds of the three products of all experts of one device, where kernels for several groups of rows compute them
    and rates follow from shapes; none elsewhere."""
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
    """Adds the router and the exchange of tokens to the forward passes of `each` product; returns the backward pass and
    what of both passes is the exchange."""
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
    weights = at.element_bytes * values / at.tensor  # gathered on one row
    gather = collective_seconds(at.links.row.all_gather, weights, layouts[0].rows)
    way, add = MARGIN * sent / link.bandwidth, 3 * weights / at.memory_bandwidth
    exchange = TokenExchange(way, link.launch + link.sync, under, gather, add)
    forward, behind = exchange.seconds(products.expert_slices)
    copied = at.style.sent_passes * sent / at.elementwise_bandwidth
    for name in ("mlp in", "mlp out"):
        each[name] += Pass(exposed=forward / 2, elementwise=copied / 2)
    return backward + Pass(exposed=behind, elementwise=2 * copied), (forward, behind)


def _sorting(at: Setting, product: Product) -> float:
    """Seconds in which a device repeats and sorts gathered tokens by expert, or adds them up; 0 for a dense weight."""
    layout, projection = product.layout, product.layout.projection
    if projection.rows == 1:
        return 0.0
    width = projection.in_dim if projection.rows_in == 1 else projection.out_dim
    read_and_written = at.style.sorted_passes * (1 + projection.rows) * layout.tokens / layout.rows * width
    return read_and_written * at.element_bytes / at.memory_bandwidth


def _with_sums(at: Setting, found: list[tuple[Pass, Pass, float]], sums: list[float]):
    """Adds the sum over the tensor devices behind each half of a block, and the same in the backward pass."""
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
    """Forward and backward pass of the attention between the projections."""
    model, pod, constants, seq, context = at.model, at.pod, at.constants, at.seq, at.sizes[2]
    heads = model.heads / at.tensor  # FSDP splits sequences instead
    heads = heads if at.style.native else math.ceil(heads)
    if at.fused:
        block = min(FUSED_BLOCK[pod.chip.platform], seq)
        wide = model.head_dim if pod.chip.platform == "tpu" else (model.head_dim + model.value_dim) / 2  # pads values
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
