"""Costs that experts add to a layer: grouped products and the router.

The time of a grouped product is the maximum of two times: that of the arithmetic on the rows that its kernel visits,
and that of the bytes that the kernel reads and writes (`mstrain.gemm.ragged.visits_of`). The model assumes that tokens
are distributed evenly over experts and devices.
"""

import math

from mstrain.gemm.ragged import visits_of
from mstrain.hardware.chips import element_bytes
from mstrain.hardware.pod import Pod
from mstrain.models.config import ModelConfig

ROUTER_PASSES = 6  # a TPU computes a float32 product as this many 16-bit products
UNIT = 128  # columns of the matrix unit; the router's output is padded to a multiple of it

Dims = tuple[int, int, int]


def grouped_seconds(
    pod: Pod, bandwidth: float, dims: Dims, groups: int, kind: str = "MatMul", dtype: str = "bf16",
    tile: Dims | None = None,
) -> float:  # fmt: skip
    """Seconds of one grouped product on one device.

    Args:
      bandwidth: memory bandwidth of the device, in bytes/s.
      dims: (rows, contracted dim, columns); the tokens of all groups are rows, of WeightGrad the contracted dim.
      groups: number of groups (experts) on the device.
      kind: MatMul, InputGrad or WeightGrad.
      tile: tile sizes of the kernel; None for those of train.py.
    """
    summed, (first, second, N) = kind == "WeightGrad", dims
    M, K = (second, first) if summed else (first, second)
    rows, moved = visits_of(M, K, N, groups, summed, tile)
    visited = (K, rows, N) if summed else (rows, K, N)
    arithmetic = pod.efficiency.gemm_seconds(pod.chip, visited, dtype)
    return max(arithmetic, element_bytes(dtype) * moved / bandwidth)


def router_seconds(model: ModelConfig, tokens: float, tensor: int, rate: float) -> float:
    """Seconds of the router's logits on one device in the forward pass; `rate` is the FLOP/s of 16-bit products."""
    columns = UNIT * math.ceil((model.experts or 0) / UNIT)
    return ROUTER_PASSES * 2.0 * tokens * model.width * columns / tensor / rate
