"""Seconds of one layer and of the output projection of a microbatch on one device."""

from dataclasses import astuple, dataclass

from mstrain.planner.stated.plan import StatedStep

BACKWARD = 1.5  # element-wise: a saved value and a gradient are read for each gradient written
FUSED_BACKWARD = 2.5  # products of a fused attention kernel's backward pass over those of its forward pass
FUSED_BLOCK = {"gpu": 128, "tpu": 1024}  # tokens; a causal kernel visits whole blocks
HIDDEN_PART = 0.8  # of the product that a collective runs under: both use memory and, on GPUs, SMs


@dataclass(frozen=True)
class Parts:
    """Seconds by what they are spent on; `tensor` and `context` are what collectives add."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(astuple(self))

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __mul__(self, times: float) -> "Parts":
        return Parts(*(times * value for value in astuple(self)))


@dataclass(frozen=True)
class Passes:
    """One microbatch through one layer or the output projection."""

    forward: Parts
    backward: Parts
    repeated: Parts = Parts()
    weight_products: float = 0.0  # seconds of the backward pass that the weights' gradients take


def projections(step: StatedStep) -> dict[str, tuple[int, int]]:
    """(input, output) features on one device of the products of a layer."""
    model, tensor = step.model, step.plan.degrees.tensor
    heads, kv = model.heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    up = model.mlp_dim * (2 if model.gated else 1)
    width = model.width
    return {
        "qkv": (width, -(-(heads + kv) // tensor)),
        "out": (-(-heads // tensor), width),
        "mlp_in": (width, -(-up // tensor)),
        "mlp_out": (-(-model.mlp_dim // tensor), width),
    }


def _products(step: StatedStep, fan_in: int, fan_out: int) -> tuple[float, float, float]:
    """Seconds of a projection's product, of its input's gradient and of its weight's."""
    fabric, tokens = step.fabric, step.tokens
    dims = ((tokens, fan_in, fan_out), (tokens, fan_out, fan_in), (fan_in, tokens, fan_out))
    forward, inputs, weights = (fabric.efficiency.gemm_seconds(fabric.chip, each, step.dtype) for each in dims)
    return forward, inputs, weights


def attention_seconds(step: StatedStep) -> tuple[float, float]:
    """Forward and backward pass of the attention between the projections."""
    model, plan, fabric = step.model, step.plan, step.fabric
    heads, seen = -(-model.heads // plan.degrees.tensor), step.seq
    queries = step.seq // plan.degrees.context
    if plan.style.fused_attention:
        block = min(FUSED_BLOCK[fabric.chip.platform], seen)
        visited = (1 + block / seen) / 2
        flops = 4.0 * plan.microbatch * queries * seen * visited * heads * model.head_dim
        forward = flops / fabric.efficiency.attention_rate(fabric.chip, model.head_dim, step.dtype)
        return forward, FUSED_BACKWARD * forward
    count = plan.microbatch * heads
    both = sum(
        fabric.efficiency.gemm_seconds(fabric.chip, dims, step.dtype, count)
        for dims in ((queries, model.head_dim, seen), (queries, seen, model.head_dim))
    )
    scores = float(count) * queries * seen * step.activation_bytes
    ahead, behind = (
        fabric.efficiency.stream_seconds(fabric.chip, passes * scores) for passes in plan.style.score_passes
    )
    return both + ahead, 2 * both + behind


def elementwise_seconds(step: StatedStep) -> float:
    """Norms, residuals, positions and activation functions of a forward pass."""
    model, style, tensor = step.model, step.plan.style, step.plan.degrees.tensor
    heads = (2 * model.heads + 2 * model.num_kv_heads) * model.head_dim
    width = style.width_passes * model.width * (0.6 if model.parallel_block else 1.0)
    inside = style.head_passes * heads + style.mlp_passes * model.mlp_dim * (1.5 if model.gated else 1.0)
    values = width / (tensor if step.plan.sequence_parallel else 1) + inside / tensor
    fabric = step.fabric
    nbytes = values * step.tokens * step.activation_bytes
    return fabric.efficiency.stream_seconds(fabric.chip, nbytes, style.kernels)


def tensor_seconds(step: StatedStep) -> float:
    """Sums over the tensor devices of a forward pass: one after attention, one after the MLP."""
    sums = 1 if step.model.parallel_block else 2
    nbytes = float(step.tokens) * step.model.width * step.activation_bytes
    return sums * step.fabric.sum_seconds(nbytes, step.group("tensor"))


def context_seconds(step: StatedStep) -> float:
    """Keys and values of the other parts of the sequence, for one layer's forward pass."""
    degrees, model = step.plan.degrees, step.model
    if degrees.context == 1:
        return 0.0
    kv = 2 * model.num_kv_heads * model.head_dim / degrees.tensor
    return step.fabric.scatter_seconds(
        step.plan.microbatch * step.seq * kv * step.activation_bytes, step.group("context")
    )


def _exposed(communication: float, hidden_under: float, hides: bool) -> float:
    return max(0.0, communication - HIDDEN_PART * hidden_under) if hides else communication


def layer_passes(step: StatedStep) -> Passes:
    """A layer: forward, backward, and what the backward pass repeats."""
    plan = step.plan
    style, remat = plan.style, plan.remat
    times = {name: _products(step, *dims) for name, dims in projections(step).items()}
    products = sum(each[0] for each in times.values())
    inputs, weights = (sum(each[i] for each in times.values()) for i in (1, 2))
    ahead, behind = attention_seconds(step)
    moved, summed, ring = elementwise_seconds(step), tensor_seconds(step), context_seconds(step)
    under = products if "tensor" in style.hides and step.fabric.chip.platform == "tpu" else 0.0
    hides = "tensor" in style.hides
    forward = Parts(products, ahead, moved, _exposed(summed, under, hides), _exposed(ring, ahead, True))
    backward = Parts(
        inputs + weights,
        behind,
        BACKWARD * moved,
        _exposed(summed, weights, hides),
        _exposed(2 * ring, behind, True),
    )
    again = [name for name in times if remat.recomputes(name)]
    sums = forward.tensor if remat.recomputes("out") or remat.recomputes("mlp_out") else 0.0
    if style.dead_code:
        again = [name for name in again if name != "mlp_out"]  # only the sum after it needs the last product
        sums = 0.0 if step.model.parallel_block else sums / 2 if remat.recomputes("out") else 0.0
        if step.model.parallel_block:
            again = [name for name in again if name != "out"]
    scores = remat.recomputes("context") if style.fused_attention else remat.recomputes("scores")
    repeated = Parts(
        sum(times[name][0] for name in again),
        ahead if scores else 0.0,
        moved if remat.elementwise else 0.0,
        sums,
        forward.context if scores else 0.0,
    )
    return Passes(forward, backward, repeated + Parts(elementwise=_offload_seconds(step, backward)), weights)


def _offload_seconds(step: StatedStep, backward: Parts) -> float:
    """What the traffic to and from host memory adds: it runs under compute, one way in each pass."""
    model, remat = step.model, step.plan.remat
    heads, kv = model.heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    sizes = {"input": model.width, "qkv": heads + kv, "context": heads, "out": model.width}
    sizes |= {"mlp_in": model.mlp_dim * (2 if model.gated else 1), "mlp_out": model.width}
    values = sum(sizes.get(part, 0) for part in remat.offloaded) / step.plan.degrees.tensor
    one_way = values * step.tokens * step.activation_bytes / step.fabric.efficiency.host
    return 2 * max(0.0, one_way - backward.seconds / 2)


def head_passes(step: StatedStep) -> Passes:
    """The output projection with its loss, and a one-hot embedding where the style has one."""
    model, fabric, tensor = step.model, step.fabric, step.plan.degrees.tensor
    columns = -(-step.vocab_size // tensor)
    forward, inputs, weights = _products(step, model.width, columns)
    if step.plan.style.one_hot:
        lookup, _, table = _products(step, columns, model.width)
        forward, weights = forward + lookup, weights + table
    logits = fabric.efficiency.stream_seconds(fabric.chip, step.plan.style.logit_bytes * step.tokens * columns / 2)
    return Passes(
        Parts(forward, elementwise=logits), Parts(inputs + weights, elementwise=logits), weight_products=weights
    )
