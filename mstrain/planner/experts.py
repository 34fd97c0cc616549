"""What experts add to the cost of a layer: kernels of grouped products, and the router.

A grouped product takes the longer of its arithmetic on the rows that its kernel visits and of what the kernel reads and
writes (`mstrain.gemm.ragged.visits_of`). The load of experts and devices is taken as even.
"""

import math

from mstrain.gemm.ragged import visits_of
from mstrain.hardware.chips import element_bytes
from mstrain.hardware.pod import Pod
from mstrain.models.config import ModelConfig

ROUTER_PASSES = 6  # products in 16 bits that a float32 product takes on a TPU
UNIT = 128  # columns of the matrix unit, to which the router's are padded

Dims = tuple[int, int, int]


def grouped_seconds(
    pod: Pod, bandwidth: float, dims: Dims, groups: int, kind: str = "MatMul", dtype: str = "bf16",
    tile: Dims | None = None,
) -> float:  # fmt: skip
    """Of a grouped product of (rows, summed, columns) of all `groups` on one device; of kind WeightGrad, rows are
    summed.

    `bandwidth`: of the device's memory; `tile`: of the kernel, where it is not that of the trainer.
    """
    summed, (first, second, N) = kind == "WeightGrad", dims
    M, K = (second, first) if summed else (first, second)
    rows, moved = visits_of(M, K, N, groups, summed, tile)
    visited = (K, rows, N) if summed else (rows, K, N)
    arithmetic = pod.efficiency.gemm_seconds(pod.chip, visited, dtype)
    return max(arithmetic, element_bytes(dtype) * moved / bandwidth)


def router_seconds(model: ModelConfig, tokens: float, tensor: int, rate: float) -> float:
    """Of the router's logits on one device, forward; `rate` in FLOP/s of products in 16 bits."""
    columns = UNIT * math.ceil((model.experts or 0) / UNIT)
    return ROUTER_PASSES * 2.0 * tokens * model.width * columns / tensor / rate
