"""What experts add to the cost of a layer: kernels of grouped products, sorted rows, the router, exchanged tokens.

A grouped product takes the longer of its arithmetic on the rows that its kernel visits and of what the kernel reads and
writes (`mstrain.gemm.ragged.visits_of`). The load of experts and devices is taken as even.

Tokens are exchanged by all-to-all over the link of `mstrain.hardware.expert_links`; what runs under products is
in `mstrain.parallel.token_exchange`.
"""

import math

from mstrain.gemm.expert_exchange import MARGIN
from mstrain.gemm.ragged import visits_of
from mstrain.hardware import Link, collective_seconds
from mstrain.hardware.chips import element_bytes
from mstrain.hardware.constants import AxisLinks
from mstrain.hardware.pod import Pod
from mstrain.models.config import ModelConfig
from mstrain.parallel.token_exchange import TokenExchange

ROUTER_PASSES = 6  # products in 16 bits that a float32 product takes on a TPU
UNIT = 128  # columns of the matrix unit, to which the router's are padded

Dims = tuple[int, int, int]


class GroupedKernels:
    """Seconds of grouped products on one device of a pod, in tiles of the trainer or in given ones."""

    def __init__(self, pod: Pod, dtype: str, bandwidth: float, tile: tuple[int, int, int] | None = None):
        self.pod, self.dtype, self.bandwidth, self.tile = pod, dtype, bandwidth, tile
        self.size = element_bytes(dtype)

    def seconds(self, kind: str, dims: Dims, groups: int) -> float:
        """Of (rows, summed, columns) of all `groups`; for kind WeightGrad rows are summed."""
        summed, (first, second, N) = kind == "WeightGrad", dims
        M, K = (second, first) if summed else (first, second)
        rows, moved = visits_of(M, K, N, groups, summed, self.tile)
        visited = (K, rows, N) if summed else (rows, K, N)
        arithmetic = self.pod.efficiency.gemm_seconds(self.pod.chip, visited, self.dtype)
        return max(arithmetic, self.size * moved / self.bandwidth)


def router_seconds(model: ModelConfig, tokens: float, tensor: int, rate: float) -> float:
    """Of the router's logits on one device, forward; `rate` in FLOP/s of products in 16 bits."""
    columns = UNIT * math.ceil((model.experts or 0) / UNIT)
    return ROUTER_PASSES * 2.0 * tokens * model.width * columns / tensor / rate


def exchange_of(
    link: Link, sent: float, products: float, weights: float, rows: AxisLinks, bandwidth: float, count: int
):
    """The exchange of a layer: a device sends `sent` bytes each way, without the margin of a round.

    `products`: seconds of the forward products; `weights`: bytes of their gathered shards on one of `count` rows, whose
    links are `rows`; `bandwidth`: of the device's memory.
    """
    return TokenExchange(
        MARGIN * sent / link.bandwidth, link.launch + link.sync, products,
        collective_seconds(rows.all_gather, weights, count), 3 * weights / bandwidth,
    )  # fmt: skip
