"""Tuner: dataflow and slice count of every product of a block on one mesh, by exhaustive search.

The MeshSlice paper (section 3.2) fixes dataflows by a rule and searches the slice count. The tuner also searches the
dataflow. "os" and "ls" keep the orientation of the activations, so each projection takes the faster of the two. "rs"
transposes its output, so a block uses it for all projections or for none, and only if the residual stream keeps its
orientation.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mstrain.gemm import MESHSLICE, same_program
from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants
from mstrain.hardware.efficiency import efficiency_of, product_seconds
from mstrain.hardware.overlap import hidden_shares
from mstrain.parallel.dataflow import (
    Projection,
    check_slices,
    legal_slices,
    mesh_fault,
    orientations,
)
from mstrain.parallel.gemms import gemm_times
from mstrain.parallel.product_cost import Cost, Layout, pass_costs

# Fractions of a product's time by which more slices (TIE), and several slices instead of one (SLICING), must be faster,
# because the cost model omits a part of their cost (docs/performance.md).
TIE, SLICING = 0.005, 0.01


@dataclass(frozen=True)
class Choice:
    """The tuned dataflow and slice count of one projection; `cost` covers the forward pass and both gradients."""

    name: str
    dataflow: str
    slices: int
    transposed: bool
    cost: Cost
    trials: tuple[tuple[int, float], ...]  # (slice count, seconds) of every legal count

    @property
    def seconds(self) -> float:
        return self.cost.seconds


@dataclass(frozen=True)
class Block:
    """The projections of a block to tune.

    Attributes:
      tokens: number of tokens of one data-parallel replica.
      constants: FLOP/s and links of the mesh.
      dataflow: `auto`, `os`, `ls` or `rs`.
      slices: slice count of all projections; None searches up to `max_slices`.
      chip: with a chip, the time of a product depends on its shape and collectives are hidden as in compiled steps, as
        in the planner; with None, all products have one rate and the overlap is that of the paper.
    """

    projections: tuple[Projection, ...]
    tokens: int
    constants: Constants
    dataflow: str = "auto"
    max_slices: int = 32
    slices: int | None = None
    chip: Chip | None = None


def tune_block(block: Block, mesh: tuple[int, int]) -> tuple[Choice, ...]:
    """The fastest choices on `mesh` (rows, cols); raises ValueError if the mesh cannot shard the block.

    With a chip, either all projections have one slice or all have several where that is legal: the barriers between
    slices expose the collectives of a product in one slice (schedules compiled for v6e, docs/performance.md).
    """
    found, faults, ranges = [], [], [(block, 1)]
    if block.chip is not None and block.slices is None:
        ranges = [(replace(block, max_slices=1), 1), (block, 2)]
    for (each, least), allowed in itertools.product(ranges, families(block).values()):
        try:
            found.append(family_choices(each, mesh, allowed, least))
        except ValueError as error:
            faults.append(error)
    if not found:
        raise faults[0]
    return min(found, key=lambda choices: _seconds(block, choices))


def _seconds(block: Block, choices: tuple[Choice, ...]) -> float:
    """Seconds by which choices are compared: with a chip, those of sliced projections are increased by `SLICING`."""
    ahead = 1 + SLICING if block.chip is not None and any(choice.slices > 1 for choice in choices) else 1.0
    return ahead * sum(choice.seconds for choice in choices)


def families(block: Block) -> dict[str, list[list[str]]]:
    """The dataflows of each projection by name of the family; of equally fast dataflows the first is chosen."""
    count = len(block.projections)
    if block.dataflow == "auto":
        found: dict[str, list[list[str]]] = {
            "os/ls": [["os", "ls"] if keeps_output(p) else ["ls", "os"] for p in block.projections]
        }
        if all(p.experts == 1 for p in block.projections) and not orientations(["rs"] * count)[-1]:
            found["rs"] = [["rs"]] * count
        return found
    return {block.dataflow: [[block.dataflow]] * count}


def family_choices(block: Block, mesh: tuple[int, int], allowed: list[list[str]], least: int = 1) -> tuple[Choice, ...]:
    """The best choices of one family, with at least `least` slices where that is legal.

    Raises ValueError if the mesh cannot shard a projection.
    """
    if allowed[0] != ["rs"]:
        return tuple(_fastest(block, p, mesh, flows, least) for p, flows in zip(block.projections, allowed))
    *flags, turned = orientations(["rs"] * len(allowed))
    if turned:
        raise ValueError("rs everywhere would leave the block's output transposed; use dataflow os or ls")
    if block.chip is not None:  # train.py keeps the residual stream of such a block transposed
        flags = [not flag for flag in flags]
    return tuple(_choice(block, p, mesh, "rs", flag, least) for p, flag in zip(block.projections, flags))


def _choice(
    block: Block, projection: Projection, mesh: tuple[int, int], dataflow: str, transposed: bool, least: int
) -> Choice:
    """The choice with the best legal slice count; raises ValueError if the mesh or the requested count is illegal."""
    (rows, cols), sizes = mesh, (projection.in_dim, projection.out_dim, block.tokens)
    fault = mesh_fault(*sizes, rows, cols, dataflow, transposed)
    if fault:
        raise ValueError(f"{projection.name}: {fault}")
    limit = block.max_slices if block.slices is None else 2 * block.slices
    legal = legal_slices(*sizes, rows, cols, dataflow, transposed=transposed, max_slices=limit)
    if block.slices is not None:
        where = f"{projection.name} ({dataflow} on {rows}x{cols})"
        legal = (check_slices(block.slices, legal, where),)
    else:
        legal = tuple(s for s in legal if s >= least) or legal
    layout = Layout(projection, block.tokens, rows, cols, dataflow, transposed)
    costs = {s: _cost(block, layout, s) for s in legal}
    trials = tuple((s, cost.seconds) for s, cost in costs.items())
    best = fewest_slices(dict(trials), 0.0 if block.chip is None else TIE)
    return Choice(projection.name, dataflow, best, transposed, costs[best], trials)


def fewest_slices(seconds: Mapping[int, float], tie: float = TIE) -> int:
    """The smallest slice count whose time exceeds that of the fastest by a fraction of at most `tie`."""
    most = (1 + tie) * min(seconds.values())
    return min(slices for slices, time in seconds.items() if time <= most)


def _cost(block: Block, layout: Layout, slices: int) -> Cost:
    """Cost of the forward pass and both gradients; one slice is Collective."""
    chip = block.chip
    if chip is None:
        return sum(pass_costs(layout, slices, block.constants), Cost(0.0, 0.0, 0.0))
    turned = layout.dataflow == "rs" and not layout.transposed  # train.py exchanges rows and columns of such a product
    if turned:
        layout = replace(layout, rows=layout.cols, cols=layout.rows, transposed=True)
    constants = block.constants.along(layout.rows, layout.cols, turned)
    _, flops = gemm_times(layout, slices, lambda dims: product_seconds(chip, constants, dims))
    hidden = hidden_shares(chip.name, same_program(MESHSLICE, layout.dataflow, layout.cols, slices))
    forward, backward = pass_costs(layout, slices, replace(constants, flops=flops), hidden)
    if slices == 1 or not constants.hbm_bandwidth:
        return forward + backward
    memory = constants.hbm_bandwidth * (efficiency_of(chip).memory if constants.shaped else 1.0)
    copies = 3 * layout.copied_bytes() / memory
    return forward + backward + Cost(copies, copies, 0.0)


def _fastest(
    block: Block, projection: Projection, mesh: tuple[int, int], dataflows: Sequence[str], least: int
) -> Choice:
    """The fastest choice among `dataflows`; raises ValueError if all of them are illegal."""
    found, faults = [], []
    if block.chip is not None and mesh[1] == 1:  # only weights are communicated; OS copies less (docs/performance.md)
        dataflows = sorted(dataflows, key=lambda dataflow: dataflow != "os")
    for dataflow in dataflows:
        try:
            found.append(_choice(block, projection, mesh, dataflow, False, least))
        except ValueError as error:
            faults.append(str(error))
    if not found:
        raise ValueError(faults[0])
    return min(found, key=lambda choice: choice.seconds)


def keeps_output(projection: Projection) -> bool:
    """Whether Y is larger than X, so that `os` keeps the larger of them in place."""
    p = projection
    return p.rows_out * p.out_dim > p.rows_in * p.in_dim
