"""The time of an operation.

A kernel takes the time of its launch plus the longer of its arithmetic and its memory traffic (inputs and outputs).
Collectives are rings. Communication occupies links and no compute units, so it can overlap with compute; messages over
the same link wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mstrain.hardware.link import ring_seconds
from mstrain.simulator.cluster import Cluster, Device
from mstrain.simulator.program import OpSpec

# Elementwise operations and reductions, each with the number of operands that it reads.
READS: dict[str, int] = dict.fromkeys(("Relu", "Softmax", "Tanh", "Sqrt", "Transpose", "ReduceMean", "Cast"), 1)
READS |= dict.fromkeys(("ReluGrad", "Add", "Sub", "Mul", "Div", "Pow", "Loss", "LossGrad"), 2)
# Operations that move data and compute nothing.
MOVES = frozenset({"Concat", "Split", "Slice", "Reshape", "Shape", "Squeeze", "Unsqueeze", "Lookup", "Identity"})
# Matrix multiplications.
PRODUCTS = frozenset({"MatMul", "Gemm", "InputGrad", "MatMulGrad", "WeightGrad"})


@dataclass(frozen=True)
class Rules:
    """The cost of operations and the numbering of workers; other rule sets are subclasses.

    Attributes:
      name: name in messages and tables.
      link_lanes: communication occupies links and overlaps with compute; otherwise it occupies the compute units of all
        devices that take part.
      axis_order: parallel axes from the outermost to the innermost, in which workers are numbered.
      first: number of the first worker.
    """

    name: str = "corrected"
    link_lanes: bool = True
    axis_order: tuple[str, str, str] = ("pipeline", "data", "tensor")
    first: int = 0

    def compute_seconds(self, spec: OpSpec, device: Device) -> float:
        """Seconds of a single-device operation. Raises ValueError for an operation without a rule."""
        kind, shapes, size = spec
        if (seconds := spec.known_seconds) is not None:
            return seconds
        if kind in ("MatMulGrad", "WeightGrad"):
            (m, k), (_, p) = shapes
            weight = self.matmul_seconds((k, m), (m, p), size, device)
            return weight if kind == "WeightGrad" else self.matmul_seconds((m, p), (p, k), size, device) + weight
        if kind in PRODUCTS:
            seconds = self.matmul_seconds(shapes[0], shapes[1], size, device)
            added = (shapes[0][0], shapes[1][1])
            return seconds + self.elementwise_seconds("Add", added, size, device) if kind == "Gemm" else seconds
        if kind in READS:
            return self.elementwise_seconds(kind, shapes[0], size, device)
        if kind in MOVES:
            return self.move_seconds(kind, shapes[0], size, device)
        if kind == "SGD":
            elements = sum(map(prod, shapes))
            return self.kernel_seconds(device, 3 * size * elements, 2 * elements)
        known = " ".join(sorted([*READS, *MOVES, *PRODUCTS, "SGD"]))
        raise ValueError(f"no cost rule for operation {kind!r}; known: {known}")

    def kernel_seconds(self, device: Device, nbytes: float, flops: float) -> float:
        """Seconds of a kernel that reads and writes `nbytes` and computes `flops` FLOPs."""
        return device.launch_seconds + max(nbytes / device.memory_bandwidth, flops / device.flops)

    def matmul_seconds(self, left: Sequence[int], right: Sequence[int], size: int, device: Device) -> float:
        """Seconds of a matrix multiplication of shapes `left` and `right`, batched over the leading dims."""
        (m, k), p, batch = left[-2:], right[-1], prod(left[:-2])
        elements = batch * m * k + prod(right[:-2]) * k * p + batch * m * p
        return self.kernel_seconds(device, size * elements, 2.0 * batch * m * k * p)

    def elementwise_seconds(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        """Seconds of an operation that computes one result per element of `shape`."""
        count, writes = prod(shape), kind != "Loss"
        return self.kernel_seconds(device, size * count * (READS[kind] + writes), count)

    def move_seconds(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        """Seconds of an operation of `MOVES`: Concat copies an operand into an allocated result, others are views."""
        return self.kernel_seconds(device, 2 * size * prod(shape), 0.0) if kind == "Concat" else 0.0

    def communication_seconds(
        self, spec: OpSpec, members: Sequence[int], cluster: Cluster
    ) -> float | tuple[float | None, ...]:
        """Seconds of a communication operation: one number, or one per member (None: no event is recorded).

        Send is from the first of `members` to the second. The last one is the root of Gather and Reduce, the first one
        the root of Scatter and Broadcast.
        """
        nbytes = prod(spec.shapes[0]) * spec.element_bytes
        if len(members) == 1:
            return 0.0
        if spec.kind == "Send":
            path = cluster.network.path(*members)
            return path.latency + nbytes / path.bandwidth
        return ring_seconds(spec.kind, nbytes, len(members), cluster.network.link(spec.kind, members))


def operation_work(spec: OpSpec) -> float:
    """FLOPs of one operation on one device; 0 for communication and data movement."""
    kind, shapes, _ = spec
    if kind in PRODUCTS:
        once = 2.0 * prod(shapes[0]) * shapes[1][-1]
        return 2 * once if kind == "MatMulGrad" else once
    if kind == "SGD":
        return 2.0 * sum(map(prod, shapes))
    return float(prod(shapes[0])) if kind in READS else 0.0
