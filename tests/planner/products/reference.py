"""The search of the reference program of MeshSlice, with which published figures are compared.

Its first stage ranks mesh shapes by communication alone; its second adds the GeMMs and scans slice counts
upwards until the first that does not improve. `tests.planner.products.tuner.tune` ranks them as mstrain does.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mstrain.hardware.constants import Constants
from mstrain.parallel.dataflow import DIMS, Projection
from mstrain.parallel.product_cost import Layout, communication_terms, sliced_cost
from tests.planner.products.tuner import choose_dataflow, first_slice

BLOCK = 8
# (divisor of the blocks per shard, slice counts tried); the first that divides counts
SLICE_COUNTS = (
    (48, (3, 4, 6, 8, 12, 16, 24)),
    (40, (4, 5, 8, 10, 20)),
    (24, (3, 4, 6, 8, 12, 24)),
    (20, (4, 5, 10, 20)),
    (16, (4, 8, 16)),
    (12, (3, 4, 12)),
    (10, (5, 10)),
    (8, (4, 8)),
    (6, (3, 6)),
    (4, (4,)),
    (5, (5,)),
)


@dataclass(frozen=True)
class Estimate:
    """Seconds of the communication of the projections of a block: forward products and both gradients."""

    traffic: float
    latency: float
    pipeline: float


def slice_counts(projection: Projection, tokens: int, rows: int, cols: int, dataflow: str) -> tuple[int, ...]:
    """The slice counts that the reference tries for one projection. Raises ValueError for shards below a block."""
    sizes = {"in": projection.in_dim, "out": projection.out_dim, "tokens": tokens}
    blocks = sizes[DIMS[dataflow][0]] // math.lcm(rows, cols) // BLOCK
    if blocks == 0:
        raise ValueError(f"{projection.name}: {rows}x{cols} shards are thinner than {BLOCK}; use fewer chips")
    return next((counts for divisor, counts in SLICE_COUNTS if blocks % divisor == 0), (blocks,))


def _layouts(projections: Iterable[Projection], tokens: int, rows: int, cols: int):
    for p in projections:
        dataflow = choose_dataflow(p.in_dim, p.out_dim, tokens)
        yield Layout(p, tokens, rows, cols, dataflow), slice_counts(p, tokens, rows, cols, dataflow)


def analytic(projections: Iterable[Projection], tokens: int, rows: int, cols: int, constants: Constants) -> Estimate:
    """First stage. The mesh with the least traffic + latency wins; compute is ignored."""
    traffic = latency = pipeline = 0.0
    for layout, counts in _layouts(projections, tokens, rows, cols):
        terms = communication_terms(layout, constants)
        launches = sum(max(t.latency_col, t.latency_row) for t in terms)
        first = sum(first_slice(t) for t in terms)
        best = min(counts, key=lambda s: s * launches + 2 * first / s)
        traffic += sum(max(t.traffic_col, t.traffic_row) for t in terms)
        latency += best * launches
        pipeline += first / best
    return Estimate(traffic, latency, pipeline)


def emulated(
    projections: Iterable[Projection], tokens: int, rows: int, cols: int, constants: Constants
) -> tuple[float, tuple[int, ...]]:
    """Second stage, with an analytic GeMM time: (seconds, slice counts of the projections).

    The reference returns the last counts that its loop tried; this function returns those it chose.
    """
    total, chosen = 0.0, []
    for layout, counts in _layouts(projections, tokens, rows, cols):
        terms, gemm = communication_terms(layout, constants), layout.gemm_seconds(constants)
        best_seconds, best = math.inf, counts[0]
        for s in counts:
            seconds = sliced_cost(terms, gemm, s, constants.overlap).seconds
            if seconds >= best_seconds:
                break
            best_seconds, best = seconds, s
        total += best_seconds
        chosen.append(best)
    return total, tuple(chosen)
