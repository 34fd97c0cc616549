"""Rule sets: what operations cost and what a training step contains.

`corrected` is for users. `notebook`, `march` and `head` repeat three versions of DistIR (microsoft/dist-ir)
to the last digit, defects included: the notebook of February 2021 (commit cec2907), the table of
`euromlsys21_results.ipynb` (commit 83d7fc3, April 2021) and the last commit (7cfa1b0, January 2022). The
defects
that `corrected` mends:

- units: a gigabit is 1.25e8 bytes (notebook: 8e9); elements are counted once; elementwise work is flops, not
  bytes;
- the output of every operation is memory traffic; a batched matmul counts its batch; the loss reads
  predictions and labels and gives one number; the launch overhead is the device's own;
- a kernel takes the longer of its arithmetic and its memory traffic, which overlap, not their sum;
- collectives are rings with latency over groups of any size, on links that run beside the compute units, so
  that communication can hide and messages can compete; a message does not stop its devices;
- gradients are summed over the data replicas (notebook: over the tensor group), as soon as they are complete,
  and the optimizer updates every weight (head: is charged for the last one only);
- the gradient of the network's input, which has no reader, is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Network, Switch
from mstrain.simulator.costs import MOVES, PRODUCTS, READS, Rules
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
    """How operations are charged and what the training step contains.

    Attributes:
      kernels: compute costs are those of the simulator; otherwise DistIR's.
      launch_seconds: charged per kernel; None: the device's own.
      matmul_element_bytes: bytes per matmul element; None: those of the operands.
      bytes_as_flops: elementwise operations cost (bytes of the first input) / (flop/s).
      move_seconds: cost of the operations in `MOVES`; those not named cost one launch.
      gigabit_bytes: bytes that a link of 1 Gbit/s is taken to move per second.
      double_counted: communication whose bytes are multiplied by the element size once more.
      rings: collectives are those of the simulator; otherwise DistIR's mean-bandwidth formulas, and power-of-two
        groups.
      gradient_axis: "data", or "tensor" for the notebook's wrong group.
      gradients_early: reduce each gradient when it is complete rather than after the last backward pass.
      optimizer: "all" weights, "last" weight only, or "none".
      input_gradient: compute and keep the gradient of the network's input.
      scalar_loss: the loss is one number rather than a tensor like the prediction.
      gather_outputs: the loss and the input gradient are all-gathered over the data replicas unless a step says
        otherwise.
      batch_count: the batch size is a further program input (4 bytes on the last stage).
      root: device 0 only holds the untransformed inputs; workers count from 1.
      schedule: the pipeline schedule unless a step says otherwise.
      allreduce_fit: {size: (a, b, c)}: all-reduce takes a * gigabits-worth + b * size + c seconds.
    """

    kernels: bool = True
    launch_seconds: float | None = None
    matmul_element_bytes: int | None = None
    bytes_as_flops: bool = False
    move_seconds: Mapping[str, float] = field(default_factory=dict)
    gigabit_bytes: float = GIGABIT
    double_counted: frozenset[str] = frozenset()
    rings: bool = True
    gradient_axis: str = "data"
    gradients_early: bool = True
    optimizer: str = "all"
    input_gradient: bool = False
    scalar_loss: bool = True
    gather_outputs: bool = False
    batch_count: bool = False
    root: bool = False
    schedule: str = "1f1b"
    allreduce_fit: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return int(self.root)

    def compute_seconds(self, spec: OpSpec, device: Device) -> float:
        kind, shapes, size = spec
        if self.kernels or kind not in (*READS, *MOVES, *PRODUCTS, "SGD"):
            return super().compute_seconds(spec, device)
        if kind in READS:
            return self._elementwise(kind, shapes[0], size, device)
        if kind in MOVES:
            return self.move_seconds.get(kind, self._kernel(device, 0.0, 0.0))
        if kind == "SGD":
            elements = sum(map(prod, shapes))
            if self.optimizer == "last":
                return self._elementwise("Add", shapes[-1], size, device)
            return self._kernel(device, 3 * size * elements, 2 * elements)
        if kind in ("MatMulGrad", "WeightGrad"):
            (m, k), (_, p) = shapes
            weight = self._matmul((k, m), (m, p), size, device)
            return weight if kind == "WeightGrad" else self._matmul((m, p), (p, k), size, device) + weight
        added = self._elementwise("Add", (shapes[0][0], shapes[1][1]), size, device) if kind == "Gemm" else 0.0
        return self._matmul(shapes[0], shapes[1], size, device) + added

    def _kernel(self, device: Device, nbytes: float, flops: float) -> float:
        launch = device.launch_seconds if self.launch_seconds is None else self.launch_seconds
        return launch + (nbytes / device.memory_bandwidth + flops / device.flops)

    def _matmul(self, left: Sequence[int], right: Sequence[int], size: int, device: Device) -> float:
        # DistIR looks at the first two dims of each operand, whatever their rank, and never at the result.
        (m, k), p = left[:2], right[1]
        elements = m * k + k * p
        return self._kernel(device, (self.matmul_element_bytes or size) * elements, 2.0 * m * k * p)

    def _elementwise(self, kind: str, shape: Sequence[int], size: int, device: Device) -> float:
        count = prod(shape)
        if self.bytes_as_flops:
            return size * count / device.flops
        reads = 1 if kind in ("Loss", "LossGrad") else READS[kind]
        return self._kernel(device, size * count * reads, count)

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
            if size in self.allreduce_fit:
                slope, per_member, constant = self.allreduce_fit[size]
                return slope * nbytes / self.gigabit_bytes + per_member * size + constant
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
    pairs = [network.path(a, b).bandwidth for i, a in enumerate(members) for b in members[i + 1 :]]
    return float(np.mean(pairs))


_DISTIR: dict[str, Any] = dict(
    kernels=False,
    rings=False,
    link_lanes=False,
    gradients_early=False,
    input_gradient=True,
    scalar_loss=False,
    root=True,
    axis_order=("data", "tensor", "pipeline"),
    schedule="distir",
)
_FREE = {"Concat": 0.0, "Identity": 0.0, "Shape": 0.0, "Split": 1e-6, "Slice": 1e-6}

RULES = {
    rules.name: rules
    for rules in (
        RuleSet("corrected"),
        RuleSet(
            "notebook",
            **_DISTIR,
            launch_seconds=0.0,
            matmul_element_bytes=2,
            bytes_as_flops=True,
            move_seconds=_FREE,
            gigabit_bytes=8e9,
            double_counted=frozenset({"Send", "Gather", "Reduce"}),
            gradient_axis="tensor",
            optimizer="none",
        ),
        RuleSet(
            "march",
            **_DISTIR,
            launch_seconds=0.0,
            matmul_element_bytes=4,
            bytes_as_flops=True,
            move_seconds=_FREE,
            double_counted=frozenset({"Send", "Gather", "Reduce", "AllGather"}),
            optimizer="none",
            gather_outputs=True,
        ),
        RuleSet(
            "head",
            **_DISTIR,
            launch_seconds=1e-5,
            move_seconds={"Identity": 0.0},
            double_counted=frozenset({"Gather", "Reduce"}),
            optimizer="last",
            gather_outputs=True,
            batch_count=True,
        ),
    )
}


def rule_set(rules: str | RuleSet) -> RuleSet:
    """The rule set called `rules` (a `RuleSet` is returned as is). Raises ValueError for an unknown name."""
    if isinstance(rules, RuleSet):
        return rules
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} is unknown; choose one of {' '.join(RULES)}")
    return RULES[rules]
