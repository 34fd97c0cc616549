"""The three GEMMs of a projection, and the local products of their slices on one device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mstrain.parallel.product_cost import GEMMS, Layout

Dims = tuple[int, int, int]  # (rows, contracted dim, columns) of a product


@dataclass(frozen=True)
class Gemm:
    """One of the three GEMMs of a projection.

    Attributes:
      kind: MatMul (forward), InputGrad or WeightGrad.
      dataflow: OS, LS or RS, which determines the collectives (`GEMMS`).
      dims: (rows, contracted dim, columns) of the product on the whole mesh.
    """

    kind: str
    dataflow: str
    dims: Dims


def gemms_of(layout: Layout) -> tuple[Gemm, Gemm, Gemm]:
    """The forward GEMM, the GEMM of the input gradient, and that of the weight gradient."""
    tokens = layout.tokens * layout.projection.rows
    fan_in, fan_out = layout.projection.in_dim, layout.projection.out_dim
    forward = layout.dataflow.upper()
    weight = "OS" if forward == "RS" else "RS"  # a weight gradient is communicated if the weight is
    (other,) = set(GEMMS) - {forward, weight}
    return (
        Gemm("MatMul", forward, (tokens, fan_in, fan_out)),
        Gemm("InputGrad", other, (tokens, fan_out, fan_in)),
        Gemm("WeightGrad", weight, (fan_in, tokens, fan_out)),
    )


def of_one_expert(layout: Layout, gemm: Gemm) -> Gemm:
    """The GEMM of one expert of the projection, with tokens divided evenly; the whole GEMM for a dense weight."""
    a, b, c = gemm.dims
    experts = layout.projection.experts
    dims = (a, max(1, b // experts), c) if gemm.kind == "WeightGrad" else (max(1, a // experts), b, c)
    return replace(gemm, dims=dims)


def local_dims(gemm: Gemm, rows: int, cols: int, slices: int) -> Dims:
    """(rows, contracted dim, columns) of one of `slices` slices on one device of a rows x cols mesh."""
    a, b, c = gemm.dims
    over_a, over_b, over_c = {"OS": (rows, slices, cols), "LS": (rows, cols, slices), "RS": (slices, rows, cols)}[
        gemm.dataflow
    ]
    return max(1, a // over_a), max(1, b // over_b), max(1, c // over_c)


def gemm_times(layout: Layout, slices: int, seconds: Callable[[Dims], float]) -> tuple[tuple[float, ...], float]:
    """(seconds of each of the three GEMMs on one device, their mean FLOP/s); `seconds(dims)` is that of one product."""
    gemms = [of_one_expert(layout, gemm) for gemm in gemms_of(layout)]
    dims = [local_dims(gemm, layout.rows, layout.cols, slices) for gemm in gemms]
    count = slices * layout.projection.experts
    times = tuple(count * seconds(each) for each in dims)
    flops = count * sum(2.0 * m * k * n for m, k, n in dims)
    return times, flops / sum(times)
