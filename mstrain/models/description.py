"""A plan in words, as a run prints and records it."""

from mstrain.gemm.padding import waste
from mstrain.models.plan import ModelPlan


def describe_plan(plan: ModelPlan, microbatch: int = 0) -> str:
    """One line: algorithm, dataflows and slice counts of every group of layers, split of sequences, padding.

    `microbatch`: sequences of the whole job, whose padding is then described too.
    """
    parts, first = [], 0
    for block, count in plan.every_group:
        halves = []
        for name, pair in (("attention", block.attention), ("mlp", block.mlp)):
            into, out = pair.into, pair.out
            slices = f" S={into.slices},{out.slices}" if into.kind.sliced else ""
            halves.append(f"{name} {into.algorithm} {into.dataflow},{out.dataflow}{slices}")
        layers = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
        parts.append(f"{layers}: {'; '.join(halves)}")
        first += count
    split = plan.groups[0][0].split
    if split.parts > 1:
        axes = " and ".join(axis for axis in split.axes if plan.head.grid.mesh.shape[axis] > 1)
        parts.append(f"sequences: {split.parts} parts over {axes}, {split.exchange}")
    padding = {name: pair for block, _ in plan.every_group for name, pair in block.sizes.padding.items()}
    if plan.padded_sequences(microbatch) > microbatch:
        padding["sequences"] = (microbatch, plan.padded_sequences(microbatch))
    if padding:
        sizes = (f"{name} {size} to {stored} ({waste(size, stored):.1%})" for name, (size, stored) in padding.items())
        parts.append(f"padding: {', '.join(sizes)}")
    if plan.stages:
        parts.append(str(plan.stages))
    return " | ".join(parts)
