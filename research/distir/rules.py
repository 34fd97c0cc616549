"""Rule sets: the cost of operations and the content of a training step.

`corrected` is for users. `notebook`, `march` and `head` repeat three versions of DistIR (microsoft/dist-ir) to the last
digit, defects included: the notebook of February 2021 (commit cec2907), the table of `euromlsys21_results.ipynb`
(commit 83d7fc3, April 2021) and the last commit (7cfa1b0, January 2022). `corrected` mends these defects:

- units: a gigabit is 1.25e8 bytes (notebook: 8e9); elements are counted once; elementwise work is flops, not bytes;
- the output of every operation is memory traffic; a batched matmul counts its batch; the loss reads predictions and
  labels and gives one number; the launch overhead is the device's own;
- a kernel takes the longer of its arithmetic and its memory traffic, which overlap, not their sum;
- collectives are rings with latency over groups of any size, on links beside the compute units;
- gradients are summed over the data replicas (notebook: over the tensor group) as soon as they are complete, and the
  optimizer updates every weight (head: is charged for the last one only);
- the gradient of the network's input, which has no reader, is not computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any, ClassVar

import numpy as np

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Network, Switch
from mstrain.simulator.costs import READS, Rules
from mstrain.simulator.program import OpSpec

DISTIR_NAMES = {
    "AllReduce": "MPIAllreduce",
    "AllGather": "MPIAllgather",
    "Gather": "MPIGather",
    "Reduce": "MPIReduce",
    "Scatter": "MPIScatter",
    "Broadcast": "MPIBroadcast",
    "SGD": "SGDOptimizer",
}


@dataclass(frozen=True)
class RuleSet(Rules):
    """Costs of operations, and the content of a training step.

    Attributes:
      original: whether it is one of DistIR's (`Original`).
      matmul_element_bytes: bytes per matmul element; None: those of the operands.
      bytes_as_flops: elementwise operations cost (bytes of the first input) / (flop/s).
      moves: seconds of operations that move data; others cost one launch.
      gigabit_bytes: bytes that a link of 1 Gbit/s moves per second.
      double_counted: communication whose bytes are multiplied by the element size once more.
      schedule: of pipelines whose stages have one chunk each.
      rings: collectives are those of the simulator; otherwise DistIR's mean-bandwidth formulas and power-of-two groups.
      gradient_axis: "data", or "tensor" for the notebook's wrong group.
      gradients_early: reduce each gradient when it is complete rather than after the last backward pass.
      optimizer: "all" weights, "last" weight only, or "none".
      gather_outputs: all-gather the loss and the input gradient over the replicas.
      batch_count: the batch size is a further program input (4 bytes on the last stage).
    """

    original: ClassVar[bool] = False
    launch_seconds: float = 0.0
    matmul_element_bytes: int | None = None
    bytes_as_flops: bool = False
    moves: Mapping[str, float] = field(default_factory=dict)
    gigabit_bytes: float = GIGABIT
    double_counted: frozenset[str] = frozenset()
    rings: bool = True
    schedule: str = "1f1b"
    gradient_axis: str = "data"
    gradients_early: bool = True
    optimizer: str = "all"
    gather_outputs: bool = False
    batch_count: bool = False

    def compute_seconds(self, spec: OpSpec, device: Device) -> float:
        if spec.kind == "SGD" and self.optimizer == "last":
            return self.elementwise_seconds("Add", spec.shapes[-1], spec.element_bytes, device)
        return super().compute_seconds(spec, device)


class Original(RuleSet):
    """DistIR's kernels, which take `launch_seconds` each; its schedule; its step, which keeps the gradient of the
    network's input and has a loss of the shape of the prediction. Workers count from 1: device 0 is a root that holds
    the untransformed inputs.
    """

    original = True

    def kernel_seconds(self, device: Device, nbytes: float, flops: float) -> float:
        return self.launch_seconds + (nbytes / device.memory_bandwidth + flops / device.flops)

    def matmul_seconds(self, left: Sequence[int], right: Sequence[int], size: int, device: Device) -> float:
        # DistIR looks at the first two dims of each operand, whatever their rank, and never at the result.
        (m, k), p = left[:2], right[1]
        return self.kernel_seconds(device, (self.matmul_element_bytes or size) * (m * k + k * p), 2.0 * m * k * p)

    def elementwise_seconds(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        if self.bytes_as_flops:
            return size * prod(shape) / device.flops
        reads = 1 if kind in ("Loss", "LossGrad") else READS[kind]
        return self.kernel_seconds(device, size * prod(shape) * reads, prod(shape))

    def move_seconds(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        return self.moves.get(kind, self.launch_seconds)

    def communication_seconds(
        self, spec: OpSpec, members: Sequence[int], cluster: Cluster
    ) -> float | tuple[float | None, ...]:
        """As in `Rules`. Raises ValueError for a group size that the rule set does not know."""
        kind, size = spec.kind, len(members)
        if self.rings or size == 1:
            return super().communication_seconds(spec, members, cluster)
        if kind in ("Scatter", "Broadcast"):
            return (None, *(0.0 for _ in members[1:]))
        nbytes = prod(spec.shapes[0]) * spec.element_bytes * (spec.element_bytes if kind in self.double_counted else 1)
        per_second = self.gigabit_bytes / GIGABIT
        if kind == "Send":
            return nbytes / (per_second * cluster.network.path(*members).bandwidth)
        if size & (size - 1):
            raise ValueError(
                f"rules={self.name} has collectives for 2, 4, 8, ... participants, not {size}; "
                "choose power-of-two degrees or rules=corrected"
            )
        if kind in ("AllReduce", "AllGather"):
            return 2 * nbytes * (size - 1) / size / (per_second * mean_bandwidth(cluster.network, members))
        if kind in ("Gather", "Reduce"):
            paths = (cluster.network.path(source, members[-1]) for source in members[:-1])
            sources = [nbytes / (per_second * path.bandwidth) for path in paths]
            return (*sources, max(sources))
        raise ValueError(f"rules={self.name} has no cost for {kind}; use rules=corrected")


def mean_bandwidth(network: Network, members: Sequence[int]) -> float:
    """Mean over the unordered pairs of `members`, as DistIR's collectives see a group."""
    if isinstance(network, Switch):
        return network.bandwidth
    return float(np.mean([network.path(a, b).bandwidth for a, b in combinations(members, 2)]))


_DISTIR: dict[str, Any] = dict(
    rings=False, link_lanes=False, schedule="distir", gradients_early=False, first=1,
    axis_order=("data", "tensor", "pipeline"),
)  # fmt: skip
_EARLY: dict[str, Any] = dict(
    **_DISTIR, bytes_as_flops=True, optimizer="none",
    moves={"Concat": 0.0, "Identity": 0.0, "Shape": 0.0, "Split": 1e-6, "Slice": 1e-6},
)  # fmt: skip
_TWICE = frozenset({"Send", "Gather", "Reduce"})

RULES = {
    rules.name: rules
    for rules in (
        RuleSet("corrected"),
        Original(
            "notebook", **_EARLY, matmul_element_bytes=2, gigabit_bytes=8e9, double_counted=_TWICE,
            gradient_axis="tensor",
        ),
        Original(
            "march", **_EARLY, matmul_element_bytes=4, double_counted=_TWICE | {"AllGather"}, gather_outputs=True
        ),
        Original(
            "head", **_DISTIR, launch_seconds=1e-5, moves={"Identity": 0.0}, optimizer="last", gather_outputs=True,
            double_counted=_TWICE - {"Send"}, batch_count=True,
        ),
    )
}  # fmt: skip


def rule_set(rules: str | RuleSet) -> RuleSet:
    """The rule set called `rules` (a `RuleSet` is returned as is). Raises ValueError for an unknown name."""
    if isinstance(rules, RuleSet):
        return rules
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} is unknown; choose one of {' '.join(RULES)}")
    return RULES[rules]
