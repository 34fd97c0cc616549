"""The autotuner of the MeshSlice paper, which ranks mesh shapes by the time of products only."""

import math
from collections.abc import Iterable
from dataclasses import replace

from mstrain.hardware import TpuSlice
from mstrain.hardware.constants import Constants
from mstrain.hardware.pod import factorizations
from mstrain.parallel.dataflow import Projection, check_dataflow
from mstrain.parallel.product_cost import Cost, Layout, Terms, communication_terms, pass_costs
from mstrain.parallel.tune import Block, families, family_choices, keeps_output
from tests.planner.products.tuning_result import AxisPair, Candidate, Tuning, why_slower

MESHSLICE, COLLECTIVE = "meshslice", "collective"


def choose_dataflow(in_dim: int, out_dim: int, tokens: int) -> str:
    """The dataflow that keeps the largest of X, W and Y in place (MeshSlice paper section 3.2.1)."""
    if out_dim > in_dim and tokens >= in_dim:
        return "os"
    if in_dim >= out_dim and tokens >= out_dim:
        return "ls"
    return "rs"


def _families(problem: Block) -> dict[str, list[list[str]]]:
    """The families of dataflows of the tuner, or for `rule` that of `choose_dataflow`."""
    if problem.dataflow != "rule":
        return families(problem)
    flows = [choose_dataflow(p.in_dim, p.out_dim, problem.tokens) for p in problem.projections]
    if any(flow != "rs" for flow in flows):  # "rs" would transpose activations that other projections read
        pairs = zip(problem.projections, flows)
        flows = [("os" if keeps_output(p) else "ls") if flow == "rs" else flow for p, flow in pairs]
    return {"rule": [[flow] for flow in flows]}


def layout_cost(layout: Layout, slices: int, constants: Constants) -> Cost:
    """Cost of one projection in `slices` slices: its forward product and both gradients."""
    forward, backward = pass_costs(layout, slices, constants)
    return forward + backward


def traffic_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes that one device receives in the three GeMMs along (col, row)."""
    devices = layout.rows * layout.cols
    col, row = layout.moving_bytes()
    return 3 * (layout.cols - 1) * col / devices, 3 * (layout.rows - 1) * row / devices


def first_slice(terms: Terms) -> float:
    """Traffic of one slice that cannot overlap: in OS both all_gathers at the same time, in LS and RS both in turn."""
    pair = terms.traffic_col, terms.traffic_row
    return max(pair) if terms.gemm == "OS" else sum(pair)


def _meshes(devices: int, meshes) -> tuple[tuple[int, int], ...]:
    if devices < 1:
        raise ValueError(f"devices must be 1 or more, not {devices}")
    if meshes is None:
        return factorizations(devices)
    if isinstance(meshes, TpuSlice):
        if meshes.devices % devices:
            raise ValueError(f"{meshes.name} has {meshes.devices} devices, which {devices} does not divide")
        return meshes.mesh_shapes(data=meshes.devices // devices)
    chosen = tuple((int(r), int(c)) for r, c in meshes)
    wrong = [_mesh(r, c) for r, c in chosen if r * c != devices or r < 1]
    if wrong or not chosen:
        right = ", ".join(_mesh(r, c) for r, c in factorizations(devices))
        raise ValueError(f"mesh {', '.join(wrong) or '(none)'} does not have {devices} devices; use {right}")
    return chosen


def _candidate(problem: Block, mesh, family: str, allowed: list[list[str]]) -> Candidate:
    """ValueError if some projection does not fit the mesh."""
    choices = family_choices(problem, mesh, allowed)
    layouts = [Layout(p, problem.tokens, *mesh, c.dataflow, c.transposed) for p, c in zip(problem.projections, choices)]
    volumes = [traffic_bytes(layout) for layout in layouts]
    terms = [
        (c.slices, term)
        for c, layout in zip(choices, layouts)
        for term in communication_terms(layout, problem.constants)
    ]
    return Candidate(
        *mesh,
        family,
        tuple(choices),
        traffic_bytes=AxisPair(sum(row for _, row in volumes), sum(col for col, _ in volumes)),
        traffic=AxisPair(sum(t.traffic_row for _, t in terms), sum(t.traffic_col for _, t in terms)),
        latency=AxisPair(sum(s * t.latency_row for s, t in terms), sum(s * t.latency_col for s, t in terms)),
        pipeline=sum(first_slice(t) / s for s, t in terms),
    )


def _search(problem: Block, meshes) -> tuple[list[Candidate], list[tuple[int, int, str]]]:
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


def _nothing_fits(problem: Block, rejected) -> str:
    """The first reason and, if the mesh is the cause, the nearest mesh of the same or a smaller size that fits."""
    rows, cols, reason = rejected[0]
    free = replace(problem, slices=None)
    if _search(free, [(rows, cols)])[0]:
        return f"mesh {_mesh(rows, cols)}: {reason}"
    for devices in reversed([r for r, _ in factorizations(rows * cols)]):
        fits = _search(free, factorizations(devices))[0]
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
    algorithm: str = MESHSLICE,
    **choices,
) -> Tuning:
    """The fastest mesh, dataflows and slice counts for one block's projections, by the cost model.

    `tokens` and `devices` are those of one data-parallel replica. `meshes` restricts the shapes: a `TpuSlice` to
    whole torus axes (the rest of its devices are replicas), a list to its entries, None to nothing.
    `choices` are those of `Block`. `algorithm` is "meshslice" or "collective", which is S = 1.
    Raises ValueError for a mesh or slice count that does not fit, with the nearest one that does.
    """
    if algorithm not in (MESHSLICE, COLLECTIVE):
        raise ValueError(f"the cost model knows {MESHSLICE} and {COLLECTIVE}, not {algorithm!r}")
    problem = Block(tuple(projections), tokens, constants, **choices)
    if algorithm == COLLECTIVE:
        if problem.slices not in (None, 1):
            raise ValueError(f"collective has one slice; drop slices={problem.slices} or use {MESHSLICE}")
        problem = replace(problem, max_slices=1)
    if problem.dataflow not in ("auto", "rule"):
        check_dataflow(problem.dataflow)
    fewest = min(tokens, problem.max_slices, 1 if problem.slices is None else problem.slices)
    if not problem.projections or fewest < 1:
        raise ValueError("tune needs a projection or more, and tokens, slices and max_slices of 1 or more")
    found, rejected = _search(problem, _meshes(devices, meshes))
    if not found:
        raise ValueError(_nothing_fits(problem, rejected))
    found.sort(key=lambda c: (c.seconds, abs(math.log(c.rows / c.cols))))
    best = found[0]
    ranked = (best, *(replace(c, why=why_slower(c, best)) for c in found[1:]))
    return Tuning(best, ranked, tuple(rejected), constants, tokens)
