"""What an operation costs: rule sets as data, and the one function that applies them.

`corrected` is for users. `notebook`, `march` and `head` repeat three versions of DistIR (microsoft/dist-ir) to the
last digit, defects included: the notebook of February 2021 (commit cec2907), the table of
`euromlsys21_results.ipynb` (commit 83d7fc3, April 2021) and the last commit (7cfa1b0, January 2022). The defects
that `corrected` mends:

- units: a gigabit is 1.25e8 bytes (notebook: 8e9); elements are counted once; elementwise work is flops, not bytes;
- the output of every operation is memory traffic; a batched matmul counts its batch; the loss reads predictions
  and labels and gives one number; the launch overhead is the device's own;
- a kernel takes the longer of its arithmetic and its memory traffic, which overlap, not their sum;
- collectives are rings with latency over groups of any size, on links that run beside the compute units, so that
  communication can hide and messages can compete; a message does not stop its devices;
- gradients are summed over the data replicas (notebook: over the tensor group), as soon as they are complete, and
  the optimizer updates every weight (head: is charged for the last one only);
- the gradient of the network's input, which nobody reads, is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from mstrain.planning.cluster import GIGABIT, Cluster, Device
from mstrain.planning.collectives import collective_seconds
from mstrain.planning.program import OpSpec

# Operands read by each elementwise operation.
READS = {"Relu": 1, "Softmax": 1, "Tanh": 1, "Sqrt": 1, "Transpose": 1, "ReduceMean": 1, "Cast": 1,
         "ReluGrad": 2, "Add": 2, "Sub": 2, "Mul": 2, "Div": 2, "Pow": 2, "Loss": 2, "LossGrad": 2}
MOVES = frozenset({"Concat", "Split", "Slice", "Reshape", "Shape", "Squeeze", "Unsqueeze", "Lookup", "Identity"})
FREE_NETWORK = frozenset({"Scatter", "Broadcast"})
DISTIR_NAMES = {"AllReduce": "MPIAllreduce", "AllGather": "MPIAllgather", "Gather": "MPIGather",
                "Reduce": "MPIReduce", "Scatter": "MPIScatter", "Broadcast": "MPIBroadcast", "SGD": "SGDOptimizer"}


@dataclass(frozen=True)
class RuleSet:
    """How operations are charged and what the training step contains.

    Attributes:
      name: how the rule set is chosen.
      launch_seconds: charged per kernel; None: the device's own.
      matmul_element_bytes: bytes per matmul element; None: those of the operands.
      bytes_as_flops: elementwise operations cost (bytes of the first input) / (flop/s).
      label_reads: operands that Loss and LossGrad are charged for.
      charge_outputs: results count as memory traffic.
      overlap_memory: a kernel takes max(memory, arithmetic) rather than the sum.
      batched_matmul: leading dims of a matmul multiply its work.
      move_seconds: cost of the operations in `MOVES`; those not named cost one launch, or nothing if
        `free_moves`, in which case Concat is charged for its traffic.
      gigabit_bytes: bytes that a link of 1 Gbit/s is taken to move per second.
      double_counted: communication whose bytes are multiplied by the element size once more.
      rings: collectives cost `collective_seconds`; otherwise DistIR's mean-bandwidth formulas, and power-of-two groups.
      link_lanes: communication runs on the links, beside compute; otherwise it stops all its devices.
      gradient_axis: "data", or "tensor" for the notebook's wrong group.
      gradients_early: reduce each gradient when it is complete rather than after the last backward pass.
      optimizer: "all" weights, "last" weight only, or "none".
      input_gradient: compute and keep the gradient of the network's input.
      scalar_loss: the loss is one number rather than a tensor like the prediction.
      gather_outputs: the loss and the input gradient are all-gathered over the data replicas unless told otherwise.
      batch_count: the batch size is a further program input (4 bytes on the last stage).
      root: device 0 only holds the untransformed inputs; workers count from 1.
      axis_order: parallel axes from the outermost to the innermost, for numbering workers.
      schedule: the pipeline schedule unless told otherwise.
      allreduce_fit: {size: (a, b, c)}: all-reduce takes a * gigabits-worth + b * size + c seconds.
    """

    name: str
    launch_seconds: float | None = None
    matmul_element_bytes: int | None = None
    bytes_as_flops: bool = False
    label_reads: int = 2
    charge_outputs: bool = True
    overlap_memory: bool = True
    batched_matmul: bool = True
    move_seconds: Mapping[str, float] = field(default_factory=dict)
    free_moves: bool = True
    gigabit_bytes: float = GIGABIT
    double_counted: frozenset[str] = frozenset()
    rings: bool = True
    link_lanes: bool = True
    gradient_axis: str = "data"
    gradients_early: bool = True
    optimizer: str = "all"
    input_gradient: bool = False
    scalar_loss: bool = True
    gather_outputs: bool = False
    batch_count: bool = False
    root: bool = False
    axis_order: tuple[str, str, str] = ("pipeline", "data", "tensor")
    schedule: str = "1f1b"
    allreduce_fit: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)


_DISTIR = dict(
    label_reads=1, charge_outputs=False, overlap_memory=False, batched_matmul=False, free_moves=False, rings=False,
    link_lanes=False, gradients_early=False, input_gradient=True, scalar_loss=False, root=True,
    axis_order=("data", "tensor", "pipeline"), schedule="distir")
_FREE = {"Concat": 0.0, "Identity": 0.0, "Shape": 0.0, "Split": 1e-6, "Slice": 1e-6}

RULES = {rules.name: rules for rules in (
    RuleSet("corrected"),
    RuleSet("notebook", **_DISTIR, launch_seconds=0.0, matmul_element_bytes=2, bytes_as_flops=True,
            move_seconds=_FREE, gigabit_bytes=8e9, double_counted=frozenset({"Send", "Gather", "Reduce"}),
            gradient_axis="tensor", optimizer="none"),
    RuleSet("march", **_DISTIR, launch_seconds=0.0, matmul_element_bytes=4, bytes_as_flops=True,
            move_seconds=_FREE, double_counted=frozenset({"Send", "Gather", "Reduce", "AllGather"}),
            optimizer="none", gather_outputs=True),
    RuleSet("head", **_DISTIR, launch_seconds=1e-5, move_seconds={"Identity": 0.0},
            double_counted=frozenset({"Gather", "Reduce"}), optimizer="last", gather_outputs=True,
            batch_count=True))}


def rule_set(rules: str | RuleSet) -> RuleSet:
    """The rule set called `rules` (a `RuleSet` is returned as it is). Raises ValueError for an unknown name."""
    if isinstance(rules, RuleSet):
        return rules
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} is unknown; choose one of {' '.join(RULES)}")
    return RULES[rules]


def compute_seconds(rules: RuleSet, spec: OpSpec, device: Device) -> float:
    """Seconds of a single-device operation. Raises ValueError for an operation without a rule."""
    kind, shapes, size = spec
    if kind in READS:
        return _elementwise(rules, kind, shapes[0], size, device)
    if kind in MOVES:
        return _move(rules, spec, device)
    if kind in ("MatMul", "Gemm"):
        seconds = _matmul(rules, *shapes[:2], size, device)
        return seconds + (_elementwise(rules, "Add", (shapes[0][0], shapes[1][1]), size, device)
                          if kind == "Gemm" else 0.0)
    if kind in ("MatMulGrad", "WeightGrad"):
        (m, k), (_, p) = shapes
        weight = _matmul(rules, (k, m), (m, p), size, device)
        return weight if kind == "WeightGrad" else _matmul(rules, (m, p), (p, k), size, device) + weight
    if kind == "SGD":
        return _optimizer(rules, shapes, size, device)
    raise ValueError(f"no cost rule for operation {kind!r}; known: "
                     + " ".join(sorted([*READS, *MOVES, "MatMul", "Gemm", "MatMulGrad", "WeightGrad", "SGD"])))


def operation_work(spec: OpSpec) -> float:
    """Floating-point operations of one operation on one device (0 for communication and data movement)."""
    kind, shapes, _ = spec
    if kind in ("MatMul", "Gemm", "MatMulGrad", "WeightGrad"):
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
    return _kernel(rules, device, 2 * spec.element_bytes * prod(spec.shapes[0]), 0.0) if spec.kind == "Concat" else 0.0


def _optimizer(rules: RuleSet, shapes: Sequence[Sequence[int]], size: int, device: Device) -> float:
    if rules.optimizer == "last":
        return _elementwise(rules, "Add", shapes[-1], size, device)
    elements = sum(map(prod, shapes))
    return _kernel(rules, device, 3 * size * elements, 2 * elements)


def communication_seconds(rules: RuleSet, spec: OpSpec, members: Sequence[int], cluster: Cluster
                          ) -> float | tuple[float | None, ...]:
    """Seconds of a communication over `members`: one number for all, or one per member (None: no event there).

    Send goes from the first member to the second; Gather and Reduce go to the last member; Scatter and Broadcast
    come from the first. Raises ValueError for a group size that the rule set does not know.
    """
    kind, size = spec.kind, len(members)
    nbytes = prod(spec.shapes[0]) * spec.element_bytes
    if size == 1:
        return 0.0
    if rules.rings:
        if kind == "Send":
            path = cluster.network.path(*members)
            return path.latency + nbytes / path.bandwidth
        return collective_seconds(kind, nbytes, cluster.network.ring(members))
    if kind in FREE_NETWORK:
        return (None, *(0.0 for _ in members[1:]))
    per_second = rules.gigabit_bytes / GIGABIT
    nbytes *= spec.element_bytes if kind in rules.double_counted else 1
    if kind == "Send":
        return nbytes / (per_second * cluster.network.path(*members).bandwidth)
    if size & (size - 1):
        raise ValueError(f"rules={rules.name} has collectives for 2, 4, 8, ... participants, not {size}; "
                         "choose power-of-two degrees or rules=corrected")
    if kind in ("AllReduce", "AllGather"):
        if size in rules.allreduce_fit:
            slope, per_member, constant = rules.allreduce_fit[size]
            return slope * nbytes / rules.gigabit_bytes + per_member * size + constant
        rate = per_second * cluster.network.mean_bandwidth(members)
        return 2 * nbytes * (size - 1) / size / rate
    if kind in ("Gather", "Reduce"):
        target = members[-1]
        sources = [nbytes / (per_second * cluster.network.path(source, target).bandwidth) for source in members[:-1]]
        return (*sources, max(sources))
    raise ValueError(f"rules={rules.name} has no cost for {kind}; use rules=corrected")
