"""What an operation costs under a rule set."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mstrain.simulator.cluster import GIGABIT, Cluster, Device
from mstrain.simulator.collectives import ring_seconds
from mstrain.simulator.program import OpSpec
from mstrain.simulator.rules import RuleSet

# Operands read by each elementwise operation.
READS = {
    "Relu": 1,
    "Softmax": 1,
    "Tanh": 1,
    "Sqrt": 1,
    "Transpose": 1,
    "ReduceMean": 1,
    "Cast": 1,
    "ReluGrad": 2,
    "Add": 2,
    "Sub": 2,
    "Mul": 2,
    "Div": 2,
    "Pow": 2,
    "Loss": 2,
    "LossGrad": 2,
}
MOVES = frozenset(
    {"Concat", "Split", "TpuSlice", "Reshape", "Shape", "Squeeze", "Unsqueeze", "Lookup", "Identity"}
)
# Kernels that are bound by memory: the first shape is what they move, in elements.
TRAFFIC = frozenset(
    {"Norm", "NormGrad", "Residual", "Activation", "ActivationGrad", "Logits", "LogitsGrad", "Adam"}
)
# Measured elsewhere: the first shape is nanoseconds.
PROFILED = frozenset({"Profiled", "ProfiledGrad", "ProfiledUpdate"})
PRODUCTS = frozenset({"MatMul", "Gemm", "InputGrad", "MatMulGrad", "WeightGrad"})
ATTENTION_BACKWARD = 2.5  # of the forward pass: five products instead of two (FlashAttention-2, section 3.1)
FREE_NETWORK = frozenset({"Scatter", "Broadcast"})


def compute_seconds(rules: RuleSet, spec: OpSpec, device: Device) -> float:
    """Seconds of a single-device operation. Raises ValueError for an operation without a rule."""
    kind, shapes, size = spec
    if kind in PROFILED:
        return 1e-9 * shapes[0][0]
    if kind in READS:
        return _elementwise(rules, kind, shapes[0], size, device)
    if kind in MOVES:
        return _move(rules, spec, device)
    if kind in TRAFFIC:
        return _kernel(rules, device, size * prod(shapes[0]), 0.0)
    if kind in ("Attention", "AttentionGrad"):
        return _kernel(rules, device, 0.0, operation_work(spec))
    if kind in ("MatMul", "Gemm", "InputGrad"):
        seconds = _matmul(rules, *shapes[:2], size, device)
        return seconds + (
            _elementwise(rules, "Add", (shapes[0][0], shapes[1][1]), size, device) if kind == "Gemm" else 0.0
        )
    if kind in ("MatMulGrad", "WeightGrad"):
        (m, k), (_, p) = shapes
        weight = _matmul(rules, (k, m), (m, p), size, device)
        return weight if kind == "WeightGrad" else _matmul(rules, (m, p), (p, k), size, device) + weight
    if kind == "SGD":
        return _optimizer(rules, shapes, size, device)
    raise ValueError(
        f"no cost rule for operation {kind!r}; known: "
        + " ".join(sorted([*READS, *MOVES, *TRAFFIC, *PRODUCTS, *PROFILED, "SGD"]))
    )


def operation_work(spec: OpSpec) -> float:
    """Floating-point operations of one operation on one device (0 for communication and data movement)."""
    kind, shapes, _ = spec
    if kind in ("Attention", "AttentionGrad"):  # (tokens x heads, head width), (tokens seen,)
        forward = 4.0 * prod(shapes[0]) * shapes[1][0]
        return forward * (ATTENTION_BACKWARD if kind == "AttentionGrad" else 1.0)
    if kind in PRODUCTS:
        once = 2.0 * prod(shapes[0]) * shapes[1][-1]
        return 2 * once if kind == "MatMulGrad" else once
    if kind == "SGD":
        return 2.0 * sum(map(prod, shapes))
    return float(prod(shapes[0])) if kind in READS else 0.0


def _kernel(rules: RuleSet, device: Device, nbytes: float, flops: float) -> float:
    launch = device.launch_seconds if rules.launch_seconds is None else rules.launch_seconds
    memory, arithmetic = nbytes / device.memory_bandwidth, flops / device.flops
    return launch + (max(memory, arithmetic) if rules.overlap_memory else memory + arithmetic)


def _matmul(rules: RuleSet, left: Sequence[int], right: Sequence[int], size: int, device: Device) -> float:
    # DistIR looks at the first two dims of each operand, whatever their rank.
    (m, k), p = (left[-2:], right[-1]) if rules.batched_matmul else (left[:2], right[1])
    batch = prod(left[:-2]) if rules.batched_matmul else 1
    elements = batch * m * k + prod(right[:-2] if rules.batched_matmul else ()) * k * p
    elements += batch * m * p if rules.charge_outputs else 0
    return _kernel(rules, device, (rules.matmul_element_bytes or size) * elements, 2.0 * batch * m * k * p)


def _elementwise(rules: RuleSet, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
    count = prod(shape)
    if rules.bytes_as_flops:
        return size * count / device.flops
    reads = rules.label_reads if kind in ("Loss", "LossGrad") else READS[kind]
    writes = 1 if rules.charge_outputs and kind != "Loss" else 0
    return _kernel(rules, device, size * count * (reads + writes), count)


def _move(rules: RuleSet, spec: OpSpec, device: Device) -> float:
    if spec.kind in rules.move_seconds:
        return rules.move_seconds[spec.kind]
    if not rules.free_moves:
        return _kernel(rules, device, 0.0, 0.0)
    # The new piece is copied behind the old ones, into memory set aside for all of them.
    return (
        _kernel(rules, device, 2 * spec.element_bytes * prod(spec.shapes[0]), 0.0)
        if spec.kind == "Concat"
        else 0.0
    )


def _optimizer(rules: RuleSet, shapes: Sequence[Sequence[int]], size: int, device: Device) -> float:
    if rules.optimizer == "last":
        return _elementwise(rules, "Add", shapes[-1], size, device)
    elements = sum(map(prod, shapes))
    return _kernel(rules, device, 3 * size * elements, 2 * elements)


def communication_seconds(
    rules: RuleSet, spec: OpSpec, members: Sequence[int], cluster: Cluster
) -> float | tuple[float | None, ...]:
    """Seconds of a communication over `members`: one number for all, or one per member (None: no event
    there).

    Send goes from the first member to the second; Gather and Reduce go to the last member; Scatter and
    Broadcast come from the first. Raises ValueError for a group size that the rule set does not know.
    """
    kind, size = spec.kind, len(members)
    nbytes = prod(spec.shapes[0]) * spec.element_bytes
    if size == 1:
        return 0.0
    if rules.rings:
        if kind == "Send":
            path = cluster.network.path(*members)
            return path.latency + nbytes / path.bandwidth
        return ring_seconds(kind, nbytes, cluster.network.ring_for(kind, members))
    if kind in FREE_NETWORK:
        return (None, *(0.0 for _ in members[1:]))
    per_second = rules.gigabit_bytes / GIGABIT
    nbytes *= spec.element_bytes if kind in rules.double_counted else 1
    if kind == "Send":
        return nbytes / (per_second * cluster.network.path(*members).bandwidth)
    if size & (size - 1):
        raise ValueError(
            f"rules={rules.name} has collectives for 2, 4, 8, ... participants, not {size}; "
            "choose power-of-two degrees or rules=corrected"
        )
    if kind in ("AllReduce", "AllGather"):
        if size in rules.allreduce_fit:
            slope, per_member, constant = rules.allreduce_fit[size]
            return slope * nbytes / rules.gigabit_bytes + per_member * size + constant
        rate = per_second * cluster.network.mean_bandwidth(members)
        return 2 * nbytes * (size - 1) / size / rate
    if kind in ("Gather", "Reduce"):
        target = members[-1]
        sources = [
            nbytes / (per_second * cluster.network.path(source, target).bandwidth) for source in members[:-1]
        ]
        return (*sources, max(sources))
    raise ValueError(f"rules={rules.name} has no cost for {kind}; use rules=corrected")
