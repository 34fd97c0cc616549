"""Rule sets: the cost of operations and the content of a training step.

`corrected` is the rule set to use. `notebook`, `march` and `head` reproduce three versions of DistIR
(microsoft/dist-ir) exactly, including their defects: the notebook of February 2021 (commit cec2907), the table of
`euromlsys21_results.ipynb` (commit 83d7fc3, April 2021) and the last commit (7cfa1b0, January 2022). `corrected` fixes
these defects:

- a gigabit is 1.25e8 bytes (notebook: 8e9); no byte count is multiplied by the element size twice; the time of
  elementwise operations follows from FLOPs and bytes (notebook, march: from bytes divided by FLOP/s);
- the output of every operation is memory traffic; a batched matmul counts its batch; the loss reads predictions and
  labels and returns one number; the launch overhead is that of the device;
- a kernel takes the longer of its arithmetic and its memory traffic, which overlap, and not their sum;
- collectives are rings with latency over groups of any size, and overlap with compute;
- gradients are summed over the data-parallel replicas (notebook: over the tensor-parallel ranks) as soon as they are
  complete, and the optimizer updates every weight (head: only the last one has a cost);
- the gradient of the network's input, which nothing reads, is not computed.
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
      original: whether it is a rule set of DistIR (`Original`).
      launch_seconds: launch overhead of every kernel in DistIR's rule sets.
      matmul_element_bytes: bytes per element of a matmul; None: those of the operands.
      bytes_as_flops: elementwise operations take (bytes of the first input) / (FLOP/s).
      moves: seconds of operations that move data, by kind; other kinds take `launch_seconds`.
      gigabit_bytes: bytes/s of a link of 1 Gbit/s.
      double_counted: kinds of communication whose bytes are multiplied by the element size twice.
      rings: collectives have the cost of rings; otherwise the formulas of DistIR, with the mean bandwidth of the group
        and for group sizes that are powers of two.
      schedule: pipeline schedule of stages with one chunk each.
      gradient_axis: axis over which gradients are summed: "data", or "tensor" as in the notebook.
      gradients_early: each gradient is reduced when it is complete; otherwise all after the last backward pass.
      optimizer: weights whose update has a cost: "all", "last" or "none".
      gather_outputs: the loss and the input gradient are all-gathered over the replicas.
      batch_count: the batch size is an additional program input (4 bytes on the last stage).
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
    """A rule set of DistIR.

    Its training step computes the gradient of the network's input, and its loss has the shape of the prediction.
    Workers are devices 1 and up; device 0 is a root that stores the inputs before they are distributed.
    """

    original = True

    def kernel_seconds(self, device: Device, nbytes: float, flops: float) -> float:
        return self.launch_seconds + (nbytes / device.memory_bandwidth + flops / device.flops)

    def matmul_seconds(self, left: Sequence[int], right: Sequence[int], size: int, device: Device) -> float:
        # DistIR counts the first two dims of each operand, whatever its rank, and not the result.
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
        """As in `Rules`. Raises ValueError for a group size for which the rule set has no cost."""
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
    """Mean bandwidth (bytes/s) over the unordered pairs of `members`, which DistIR's collectives use."""
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
