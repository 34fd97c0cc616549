"""Rule sets: what operations cost and what a training step contains, as data (`costs.py` applies them).

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
- the gradient of the network's input, which nobody reads, is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mstrain.simulator.cluster import GIGABIT

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
      rings: collectives cost `ring_seconds`; otherwise DistIR's mean-bandwidth formulas, and power-of-two
        groups.
      link_lanes: communication runs on the links, beside compute; otherwise it stops all its devices.
      gradient_axis: "data", or "tensor" for the notebook's wrong group.
      gradients_early: reduce each gradient when it is complete rather than after the last backward pass.
      optimizer: "all" weights, "last" weight only, or "none".
      input_gradient: compute and keep the gradient of the network's input.
      scalar_loss: the loss is one number rather than a tensor like the prediction.
      gather_outputs: the loss and the input gradient are all-gathered over the data replicas unless told
        otherwise.
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
    label_reads=1,
    charge_outputs=False,
    overlap_memory=False,
    batched_matmul=False,
    free_moves=False,
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
