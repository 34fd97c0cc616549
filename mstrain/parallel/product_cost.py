"""Cost model of the three GeMMs of a projection (MeshSlice paper section 3.2.2)."""

import math
from dataclasses import dataclass

from mstrain.hardware import collective_seconds
from mstrain.hardware.constants import OVERLAPS, AxisLinks, Constants
from mstrain.hardware.overlap import Hidden
from mstrain.parallel.dataflow import MOVING, Projection, check_dataflow, swapped

# GeMM -> (collective between columns, collective between rows)
GEMMS = {
    "OS": ("all_gather", "all_gather"),
    "LS": ("reduce_scatter", "all_gather"),
    "RS": ("all_gather", "reduce_scatter"),
}


@dataclass(frozen=True)
class Layout:
    """A projection on a rows x cols mesh, for `tokens` tokens of one replica.

    `dataflow` is os, ls or rs; `transposed`: whether the input is transposed; `dtype_bytes`: bytes per element.
    """

    projection: Projection
    tokens: int
    rows: int
    cols: int
    dataflow: str
    transposed: bool = False
    dtype_bytes: int = 2

    def _values(self) -> dict[str, int]:
        """Number of elements of each whole matrix."""
        p, t = self.projection, self.tokens
        w = p.experts * p.in_dim * p.out_dim
        return {"x": t * p.rows_in * p.in_dim, "w": w, "y": t * p.rows_out * p.out_dim}

    def moving_bytes(self) -> tuple[int, int]:
        """Bytes of the whole matrices that are communicated between (columns, rows)."""
        values = self._values()
        col, row = (values[m] * self.dtype_bytes for m in MOVING[check_dataflow(self.dataflow)])
        return (row, col) if swapped(self.dataflow, self.transposed) else (col, row)

    def copied_bytes(self) -> float:
        """Bytes that one GEMM reads and writes on one device to copy communicated matrices from or to slices."""
        return 2 * sum(self.moving_bytes()) / (self.rows * self.cols)

    @property
    def multiplications(self) -> int:
        """Multiplications per token."""
        return self.projection.rows * self.projection.in_dim * self.projection.out_dim

    def accumulating_seconds(self, constants: Constants) -> tuple[float, float]:
        """HBM seconds of the OS GeMM: (reading both gathered operands, reading and writing the float32 accumulator
        in every slice). Zeros if the bandwidth is unknown."""
        if constants.hbm_bandwidth is None:
            return 0.0, 0.0
        (still,) = (n for matrix, n in self._values().items() if matrix not in MOVING[self.dataflow])
        col, row = self.moving_bytes()
        operands, accumulator = col / self.rows + row / self.cols, 8 * still / (self.rows * self.cols)
        return operands / constants.hbm_bandwidth, accumulator / constants.hbm_bandwidth

    def gemm_seconds(self, constants: Constants) -> float:
        """Seconds of one of the three local GeMMs, unsliced."""
        p = self.projection
        return 2 * self.tokens * p.rows * p.in_dim * p.out_dim / (self.rows * self.cols) / constants.flops


@dataclass(frozen=True)
class Cost:
    """Seconds of the three GeMMs of one projection; `communication` is the sum over both axes."""

    seconds: float
    compute: float
    communication: float

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for communication and does not compute."""
        return self.seconds - self.compute

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.seconds + other.seconds, self.compute + other.compute, self.communication + other.communication
        )


@dataclass(frozen=True)
class Terms:
    """Communication of one GeMM in seconds per axis: `traffic` of bytes, `latency` of launches and syncs."""

    gemm: str
    traffic_col: float
    traffic_row: float
    latency_col: float
    latency_row: float


def _split(links: AxisLinks, collective: str, shard_bytes: float, participants: int) -> tuple[float, float]:
    link = getattr(links, collective)
    latency = collective_seconds(link, 0, participants)
    return collective_seconds(link, shard_bytes, participants) - latency, latency


def communication_terms(layout: Layout, constants: Constants) -> tuple[Terms, ...]:
    """The three GeMMs' collectives, unsliced; S slices divide the traffic by S and repeat the latency."""
    devices = layout.rows * layout.cols
    col_bytes, row_bytes = (size / devices for size in layout.moving_bytes())
    terms = []
    for gemm, (col_kind, row_kind) in GEMMS.items():
        traffic_col, latency_col = _split(constants.col, col_kind, col_bytes, layout.cols)
        traffic_row, latency_row = _split(constants.row, row_kind, row_bytes, layout.rows)
        terms.append(Terms(gemm, traffic_col, traffic_row, latency_col, latency_row))
    return tuple(terms)


def _combine(weights: tuple[float, float], a: float, b: float) -> float:
    return weights[0] * max(a, b) + weights[1] * min(a, b)


def contended(multiply: float, memory: float) -> float:
    """Seconds of a multiplication whose arithmetic takes `multiply` seconds and whose HBM traffic `memory` seconds.

    They overlap, but slow each other down if both take about as long. The exponent is fitted to the products of a step
    on 256 v6e in 2, 4 and 6 slices (docs/planning.md).
    """
    return math.hypot(multiply**2, memory**2) ** 0.5


def sliced_cost(
    terms: tuple[Terms, ...],
    gemm_seconds: float,
    slices: int,
    overlap: str,
    accumulating: tuple[float, float] = (0.0, 0.0),
    hidden: Hidden | None = None,
) -> Cost:
    """Prologue + (S - 1) * max(communicate, multiply) + last multiplication, summed over the GeMMs in `terms`.

    The prologue is the first all_gathers and, for LS and RS, the last reduce_scatter. S = 1 is Collective. A slice of
    OS takes the time of `contended`; its HBM time is from `accumulating`, the result of `Layout.accumulating_seconds`.

    With `hidden`, the GeMMs do not depend on each other, as the two gradients of a product, and are part of a training
    step. Then a fraction of each collective of the prologue is hidden: `hidden` applies to its time, or to that of all
    multiplications if that is shorter. Slices of different GeMMs overlap: the total is the maximum of three times
    (multiplications with prologues, links between columns, links between rows), plus the time of `hidden.left`.
    """
    rule = OVERLAPS[overlap]
    operands, accumulator = (0.0, 0.0) if slices == 1 else accumulating
    plain, memory = gemm_seconds / slices, operands / slices + accumulator
    multiplies = [contended(plain, memory) if term.gemm == "OS" else plain for term in terms]
    compute = slices * sum(multiplies)
    total = cols = rows = prologues = 0.0
    for term, multiply in zip(terms, multiplies):
        col = term.traffic_col / slices + term.latency_col
        row = term.traffic_row / slices + term.latency_row
        shares = (getattr(hidden, kind) if hidden else 0.0 for kind in GEMMS[term.gemm])
        shown = (time - share * min(time, compute) for time, share in zip((col, row), shares))
        prologue = _combine(rule.gathers if term.gemm == "OS" else rule.chain, *shown)
        communicate = _combine(rule.steady, col, row)
        step = max(communicate, multiply) if rule.hides else communicate + multiply
        total += prologue + (slices - 1) * step + multiply
        prologues += prologue
        cols += slices * col
        rows += slices * row
    if hidden and rule.hides:
        total = max(prologues + compute, cols, rows) + (slices > 1) * hidden.left * (cols + rows)
    return Cost(total, compute, cols + rows)


def pass_costs(
    layout: Layout, slices: int, constants: Constants, hidden: tuple[Hidden, Hidden] | None = None
) -> tuple[Cost, Cost]:
    """Costs of the (forward, backward) pass of one projection in `slices` slices, with the `hidden` fractions of each.

    With `hidden`, the product is part of a training step, in which the compiler all-gathers dy once if both gradients
    gather the same slices of it.
    """
    terms, memory = communication_terms(layout, constants), layout.accumulating_seconds(constants)
    ahead, gemm = layout.dataflow.upper(), layout.gemm_seconds(constants)
    behind = tuple(term for term in terms if term.gemm != ahead)

    def cost(each: tuple[Terms, ...], shares: Hidden | None) -> Cost:
        return sliced_cost(each, gemm, slices, constants.overlap, memory, shares)

    forward, backward = hidden or (None, None)
    return (
        cost(tuple(term for term in terms if term.gemm == ahead), forward),
        cost(behind if hidden is None else _gathering_once(behind), backward),
    )


def _gathering_once(gradients: tuple[Terms, ...]) -> tuple[Terms, ...]:
    """Terms of the two gradients of a product; those of the second are 0 for a matrix that both all-gather."""
    first, second = gradients
    col, row = (0 if a == b == "all_gather" else 1 for a, b in zip(GEMMS[first.gemm], GEMMS[second.gemm], strict=True))
    once = Terms(
        second.gemm,
        col * second.traffic_col, row * second.traffic_row,
        col * second.latency_col, row * second.latency_row,
    )  # fmt: skip
    return first, once
