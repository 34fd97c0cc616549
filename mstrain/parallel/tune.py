"""Dataflow and slice count of every product of a block on one mesh, by exhaustive search.

The MeshSlice paper (section 3.2) fixes dataflows by a rule and searches the slice count. Here the dataflow is searched
too. "os" and "ls" leave the orientation of the activations alone, so each projection picks the faster one by itself,
which covers the rule and "os everywhere"; "rs" turns the activations, so a block uses it for every projection or for
none, and only where the turns cancel before the residual addition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mstrain.hardware.constants import Constants
from mstrain.parallel.dataflow import (
    Projection,
    check_slices,
    choose_dataflow,
    legal_slices,
    mesh_fault,
    orientations,
)
from mstrain.parallel.product_cost import Layout, communication_terms, sliced_cost


@dataclass(frozen=True)
class Choice:
    """One projection as tuned. Seconds are for all its repeats, forward and both gradients."""

    name: str
    dataflow: str
    slices: int
    transposed: bool
    seconds: float
    compute: float
    communication: float
    trials: tuple[tuple[int, float], ...]  # (slice count, seconds) of every legal count

    @property
    def exposed(self) -> float:
        return self.seconds - self.compute


@dataclass(frozen=True)
class Block:
    """The projections of a block to tune.

    Attributes:
      tokens: of one data-parallel replica.
      dataflow: auto, rule (the paper's), os, ls or rs.
      slices: one count for all; None searches up to `max_slices`.
    """

    projections: tuple[Projection, ...]
    tokens: int
    constants: Constants
    dataflow: str = "auto"
    max_slices: int = 32
    slices: int | None = None
    dtype_bytes: int = 2


def factorisations(devices: int) -> tuple[tuple[int, int], ...]:
    """Every (rows, cols) with rows * cols == devices, 1 x N and N x 1 included."""
    return tuple((r, devices // r) for r in range(1, devices + 1) if devices % r == 0)


def tune_block(block: Block, mesh: tuple[int, int]) -> tuple[Choice, ...]:
    """The fastest choices on `mesh` (rows, cols); raises ValueError when the block does not fit it."""
    found, faults = [], []
    for allowed in families(block).values():
        try:
            found.append(family_choices(block, mesh, allowed))
        except ValueError as error:
            faults.append(error)
    if not found:
        raise faults[0]
    return min(found, key=lambda choices: sum(choice.seconds for choice in choices))


def families(block: Block) -> dict[str, list[list[str]]]:
    """Family name -> the dataflows each projection may pick from; the first wins ties."""
    count = len(block.projections)
    if block.dataflow == "auto":
        found = {"os/ls": [sorted(("os", "ls"), key=lambda flow: flow != _larger(p)) for p in block.projections]}
        turned = orientations(block.projections, ["rs"] * count)[-1]
        return found if turned else found | {"rs": [["rs"]] * count}
    if block.dataflow != "rule":
        return {block.dataflow: [[block.dataflow]] * count}
    flows = [choose_dataflow(p.in_dim, p.out_dim, block.tokens) for p in block.projections]
    if any(flow != "rs" for flow in flows):
        # Beside os and ls, "rs" would turn activations that its neighbours read.
        flows = [_larger(p) if flow == "rs" else flow for p, flow in zip(block.projections, flows)]
    return {"rule": [[flow] for flow in flows]}


def family_choices(block: Block, mesh: tuple[int, int], allowed: list[list[str]]) -> tuple[Choice, ...]:
    """The best choices within one family; raises ValueError if some projection does not fit the mesh."""
    if allowed[0] != ["rs"]:
        return tuple(_fastest(block, p, mesh, flows) for p, flows in zip(block.projections, allowed))
    *flags, turned = orientations(block.projections, ["rs"] * len(allowed))
    if turned:
        raise ValueError("rs everywhere would leave the block's output transposed; use dataflow os or ls")
    return tuple(_choice(block, p, mesh, "rs", flag) for p, flag in zip(block.projections, flags))


def _choice(block: Block, projection: Projection, mesh, dataflow: str, transposed: bool) -> Choice:
    """The best legal slice count; ValueError if the mesh or the requested count does not fit."""
    shape = (projection.in_dim, projection.out_dim, block.tokens, *mesh, dataflow)
    fault = mesh_fault(*shape, transposed)
    if fault:
        raise ValueError(f"{projection.name}: {fault}")
    limit = block.max_slices if block.slices is None else 2 * block.slices
    legal = legal_slices(*shape, transposed=transposed, max_slices=limit)
    if block.slices is not None:
        where = f"{projection.name} ({dataflow} on {mesh[0]}x{mesh[1]})"
        legal = (check_slices(block.slices, legal, where),)
    layout = Layout(projection, block.tokens, *mesh, dataflow, transposed, block.dtype_bytes)
    constants = block.constants
    terms, gemm = communication_terms(layout, constants), layout.gemm_seconds(constants)
    memory = layout.accumulating_seconds(constants)
    costs = {s: sliced_cost(terms, gemm, s, constants.overlap, memory) for s in legal}
    best = min(legal, key=lambda s: (costs[s].seconds, s))
    cost, n = costs[best], projection.repeats
    seconds, compute, communication = n * cost.seconds, n * cost.compute, n * cost.communication
    trials = tuple((s, n * cost.seconds) for s, cost in costs.items())
    return Choice(projection.name, dataflow, best, transposed, seconds, compute, communication, trials)


def _fastest(block: Block, projection: Projection, mesh, dataflows: Sequence[str]) -> Choice:
    found, faults = [], []
    for dataflow in dataflows:
        try:
            found.append(_choice(block, projection, mesh, dataflow, False))
        except ValueError as error:
            faults.append(str(error))
    if not found:
        raise ValueError(faults[0])
    return min(found, key=lambda choice: choice.seconds)


def _larger(projection: Projection) -> str:
    """The dataflow that keeps the larger of X and Y still."""
    return "os" if projection.out_dim > projection.in_dim else "ls"
