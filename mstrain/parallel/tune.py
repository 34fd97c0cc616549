"""The autotuner: mesh shape, dataflow and slice count of every projection, by exhaustive search.

The MeshSlice paper (section 3.2) fixes dataflows by a rule and searches shape and slice count. Here the
dataflow is searched too. "os" and "ls" leave the orientation of the activations alone, so each projection
picks the faster one by itself, which covers the rule and "os everywhere"; "rs" turns the activations, so a
block uses it for every projection or for none, and only where the turns cancel before the residual addition.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mstrain.hardware import TpuSlice
from mstrain.hardware.constants import Constants
from mstrain.parallel.dataflow import (
    Projection,
    check_dataflow,
    check_slices,
    choose_dataflow,
    legal_slices,
    mesh_fault,
    orientations,
)
from mstrain.parallel.product_cost import Layout, communication_terms, sliced_cost
from mstrain.parallel.tuning_result import AxisPair, Candidate, Choice, Tuning, why_slower

MESHSLICE, COLLECTIVE = "meshslice", "collective"


@dataclass(frozen=True)
class _Problem:
    projections: tuple[Projection, ...]
    tokens: int
    constants: Constants
    dataflow: str
    max_slices: int
    slices: int | None
    dtype_bytes: int


def factorisations(devices: int) -> tuple[tuple[int, int], ...]:
    """Every (rows, cols) with rows * cols == devices, 1 x N and N x 1 included."""
    return tuple((r, devices // r) for r in range(1, devices + 1) if devices % r == 0)


def _meshes(devices: int, meshes) -> tuple[tuple[int, int], ...]:
    if devices < 1:
        raise ValueError(f"devices must be 1 or more, not {devices}")
    if meshes is None:
        return factorisations(devices)
    if isinstance(meshes, TpuSlice):
        if meshes.devices % devices:
            raise ValueError(f"{meshes.name} has {meshes.devices} devices, which {devices} does not divide")
        return meshes.mesh_shapes(data=meshes.devices // devices)
    chosen = tuple((int(r), int(c)) for r, c in meshes)
    wrong = [_mesh(r, c) for r, c in chosen if r * c != devices or r < 1]
    if wrong or not chosen:
        right = ", ".join(_mesh(r, c) for r, c in factorisations(devices))
        raise ValueError(f"mesh {', '.join(wrong) or '(none)'} does not have {devices} devices; use {right}")
    return chosen


def _choice(problem: _Problem, projection: Projection, mesh, dataflow: str, transposed: bool) -> Choice:
    """The best legal slice count; ValueError if the mesh or the requested count does not fit."""
    shape = (projection.in_dim, projection.out_dim, problem.tokens, *mesh, dataflow)
    fault = mesh_fault(*shape, transposed)
    if fault:
        raise ValueError(f"{projection.name}: {fault}")
    limit = problem.max_slices if problem.slices is None else 2 * problem.slices
    legal = legal_slices(*shape, transposed=transposed, max_slices=limit)
    if problem.slices is not None:
        where = f"{projection.name} ({dataflow} on {mesh[0]}x{mesh[1]})"
        legal = (check_slices(problem.slices, legal, where),)
    layout = Layout(projection, problem.tokens, *mesh, dataflow, transposed, problem.dtype_bytes)
    constants = problem.constants
    terms, gemm = communication_terms(layout, constants), layout.gemm_seconds(constants)
    memory = layout.accumulating_seconds(constants)
    costs = {s: sliced_cost(terms, gemm, s, constants.overlap, memory) for s in legal}
    best = min(legal, key=lambda s: (costs[s].seconds, s))
    cost, n = costs[best], projection.repeats
    trials = tuple((s, n * cost.seconds) for s, cost in costs.items())
    return Choice(projection.name, dataflow, best, transposed, n * cost.seconds, n * cost.compute,
                  n * cost.communication, trials)


def _fastest(problem: _Problem, projection: Projection, mesh, dataflows: Sequence[str]) -> Choice:
    found, faults = [], []
    for dataflow in dataflows:
        try:
            found.append(_choice(problem, projection, mesh, dataflow, False))
        except ValueError as error:
            faults.append(str(error))
    if not found:
        raise ValueError(faults[0])
    return min(found, key=lambda choice: choice.seconds)


def _larger(projection: Projection) -> str:
    """The dataflow that keeps the larger of X and Y still."""
    return "os" if projection.out_dim > projection.in_dim else "ls"


def _families(problem: _Problem) -> dict[str, list[list[str]]]:
    """Family name -> the dataflows each projection may pick from; the first wins ties."""
    count = len(problem.projections)
    if problem.dataflow == "auto":
        families = {"os/ls": [sorted(("os", "ls"), key=lambda flow: flow != _larger(p))
                              for p in problem.projections]}
        turned = orientations(problem.projections, ["rs"] * count)[-1]
        return families if turned else families | {"rs": [["rs"]] * count}
    if problem.dataflow != "rule":
        return {problem.dataflow: [[problem.dataflow]] * count}
    flows = [choose_dataflow(p.in_dim, p.out_dim, problem.tokens) for p in problem.projections]
    if any(flow != "rs" for flow in flows):
        # Beside os and ls, "rs" would turn activations that its neighbours read.
        flows = [_larger(p) if flow == "rs" else flow for p, flow in zip(problem.projections, flows)]
    return {"rule": [[flow] for flow in flows]}


def _candidate(problem: _Problem, mesh, family: str, allowed: list[list[str]]) -> Candidate:
    """ValueError if some projection does not fit the mesh."""
    if allowed[0] == ["rs"]:
        *flags, turned = orientations(problem.projections, ["rs"] * len(allowed))
        if turned:
            raise ValueError("rs everywhere would leave the block's output transposed; use dataflow os or ls")
        choices = [_choice(problem, p, mesh, "rs", flag) for p, flag in zip(problem.projections, flags)]
    else:
        choices = [_fastest(problem, p, mesh, flows) for p, flows in zip(problem.projections, allowed)]
    layouts = [Layout(p, problem.tokens, *mesh, c.dataflow, c.transposed, problem.dtype_bytes)
               for p, c in zip(problem.projections, choices)]
    volumes = [(p.repeats, layout.traffic_bytes()) for p, layout in zip(problem.projections, layouts)]
    terms = [(p.repeats, c.slices, term) for p, c, layout in zip(problem.projections, choices, layouts)
             for term in communication_terms(layout, problem.constants)]
    return Candidate(
        *mesh, family, tuple(choices),
        traffic_bytes=AxisPair(sum(n * row for n, (_, row) in volumes),
                               sum(n * col for n, (col, _) in volumes)),
        traffic=AxisPair(sum(n * t.traffic_row for n, _, t in terms),
                         sum(n * t.traffic_col for n, _, t in terms)),
        latency=AxisPair(sum(n * s * t.latency_row for n, s, t in terms),
                         sum(n * s * t.latency_col for n, s, t in terms)),
        pipeline=sum(n * t.first_slice / s for n, s, t in terms),
    )


def _search(problem: _Problem, meshes) -> tuple[list[Candidate], list[tuple[int, int, str]]]:
    found, rejected = [], []
    for mesh in meshes:
        for family, allowed in _families(problem).items():
            try:
                found.append(_candidate(problem, mesh, family, allowed))
            except ValueError as error:
                rejected.append((*mesh, str(error)))
    return found, rejected


def _mesh(rows: int, cols: int) -> str:
    return f"row{rows}-col{cols}"


def _nothing_fits(problem: _Problem, rejected) -> str:
    """The first reason; where the mesh is at fault, also the nearest that fits, of its size or smaller."""
    rows, cols, reason = rejected[0]
    free = replace(problem, slices=None)
    if _search(free, [(rows, cols)])[0]:
        return f"mesh {_mesh(rows, cols)}: {reason}"
    for devices in reversed([r for r, _ in factorisations(rows * cols)]):
        fits = _search(free, factorisations(devices))[0]
        if fits:
            near = min(fits, key=lambda c: abs(math.log(c.rows * cols / (c.cols * rows))))
            return f"mesh {_mesh(rows, cols)}: {reason}; the nearest mesh that fits is {_mesh(near.rows, near.cols)}"
    return f"mesh {_mesh(rows, cols)}: {reason}"


def tune(
    projections: Iterable[Projection],
    tokens: int,
    devices: int,
    constants: Constants,
    *,
    meshes: TpuSlice | Iterable[tuple[int, int]] | None = None,
    max_slices: int = 32,
    slices: int | None = None,
    dataflow: str = "auto",
    algorithm: str = MESHSLICE,
    dtype_bytes: int = 2,
) -> Tuning:
    """The fastest mesh, dataflows and slice counts for one block's projections, by the cost model.

    `tokens` and `devices` are those of one data-parallel replica. `meshes` restricts the shapes: a `TpuSlice` to
    whole torus axes (the rest of its devices are replicas), a list to its entries, None to nothing.
    `slices` fixes one count for all. `dataflow` is "auto", "rule" (the paper's), "os", "ls" or "rs".
    `algorithm` is "meshslice" or "collective", which is S = 1.
    Raises ValueError naming the nearest legal value when a mesh or slice count cannot be had.
    """
    if algorithm not in (MESHSLICE, COLLECTIVE):
        raise ValueError(f"the cost model knows {MESHSLICE} and {COLLECTIVE}, not {algorithm!r}")
    if algorithm == COLLECTIVE and slices not in (None, 1):
        raise ValueError(f"collective has one slice; drop slices={slices} or use {MESHSLICE}")
    if dataflow not in ("auto", "rule"):
        check_dataflow(dataflow)
    limit = 1 if algorithm == COLLECTIVE else max_slices
    problem = _Problem(tuple(projections), tokens, constants, dataflow, limit, slices, dtype_bytes)
    if not problem.projections or min(tokens, max_slices, 1 if slices is None else slices) < 1:
        raise ValueError("tune needs a projection or more, and tokens, slices and max_slices of 1 or more")
    found, rejected = _search(problem, _meshes(devices, meshes))
    if not found:
        raise ValueError(_nothing_fits(problem, rejected))
    found.sort(key=lambda c: (c.seconds, abs(math.log(c.rows / c.cols))))
    best = found[0]
    ranked = (best, *(replace(c, why=why_slower(c, best)) for c in found[1:]))
    return Tuning(best, ranked, tuple(rejected), constants, tokens)
