"""The time of an operation.

A kernel takes the longer of its arithmetic and its memory traffic, inputs and outputs included, and its launch.
Collectives are rings on links beside the compute units: communication can be hidden and messages can compete. A message
does not stop its devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mstrain.hardware.link import ring_seconds
from mstrain.simulator.cluster import Cluster, Device
from mstrain.simulator.program import OpSpec

# Operands read by each elementwise operation.
READS: dict[str, int] = dict.fromkeys(("Relu", "Softmax", "Tanh", "Sqrt", "Transpose", "ReduceMean", "Cast"), 1)
READS |= dict.fromkeys(("ReluGrad", "Add", "Sub", "Mul", "Div", "Pow", "Loss", "LossGrad"), 2)
MOVES = frozenset({"Concat", "Split", "Slice", "Reshape", "Shape", "Squeeze", "Unsqueeze", "Lookup", "Identity"})
PRODUCTS = frozenset({"MatMul", "Gemm", "InputGrad", "MatMulGrad", "WeightGrad"})


@dataclass(frozen=True)
class Rules:
    """How operations are charged and workers numbered; other rule sets derive from this one.

    Attributes:
      link_lanes: communication runs on the links, beside compute; otherwise it stops all its devices.
      axis_order: parallel axes from the outermost to the innermost, for numbering workers from `first`.
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
        """Seconds of a kernel that moves `nbytes` and does `flops`."""
        return device.launch_seconds + max(nbytes / device.memory_bandwidth, flops / device.flops)

    def matmul_seconds(self, left: Sequence[int], right: Sequence[int], size: int, device: Device) -> float:
        """Seconds of a product, batched over the leading dims."""
        (m, k), p, batch = left[-2:], right[-1], prod(left[:-2])
        elements = batch * m * k + prod(right[:-2]) * k * p + batch * m * p
        return self.kernel_seconds(device, size * elements, 2.0 * batch * m * k * p)

    def elementwise_seconds(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        """Seconds of an operation of one result per element."""
        count, writes = prod(shape), kind != "Loss"
        return self.kernel_seconds(device, size * count * (READS[kind] + writes), count)

    def move_seconds(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        """Concat copies the new piece behind the old ones, into memory set aside for all; others are views."""
        return self.kernel_seconds(device, 2 * size * prod(shape), 0.0) if kind == "Concat" else 0.0

    def communication_seconds(
        self, spec: OpSpec, members: Sequence[int], cluster: Cluster
    ) -> float | tuple[float | None, ...]:
        """Seconds of a communication over `members`: one number, or one per member (None: no event there).

        Send is from the first member to the second; Gather and Reduce end on the last member; Scatter and
        Broadcast start from the first.
        """
        nbytes = prod(spec.shapes[0]) * spec.element_bytes
        if len(members) == 1:
            return 0.0
        if spec.kind == "Send":
            path = cluster.network.path(*members)
            return path.latency + nbytes / path.bandwidth
        return ring_seconds(spec.kind, nbytes, len(members), cluster.network.link(spec.kind, members))


def operation_work(spec: OpSpec) -> float:
    """Floating-point operations of one operation on one device (0 for communication and data movement)."""
    kind, shapes, _ = spec
    if kind in PRODUCTS:
        once = 2.0 * prod(shapes[0]) * shapes[1][-1]
        return 2 * once if kind == "MatMulGrad" else once
    if kind == "SGD":
        return 2.0 * sum(map(prod, shapes))
    return float(prod(shapes[0])) if kind in READS else 0.0
