"""Seconds and bytes of the parts of one stage: products, attention, element-wise work, per microbatch.

Products cost what the tuner's model says of one forward and two backward GEMMs, slices overlapped (MeshSlice
paper section 3.2.2), at the rate of GEMMs or as fast as memory feeds a slice; collectives of Megatron and
FSDP are not overlapped, as train.py runs them. Attention runs at the rate of GEMMs; element-wise work at the
bandwidth of memory, each value read and written once.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

from mstrain.hardware.constants import Constants
from mstrain.models.config import ModelConfig
from mstrain.parallel.product_cost import Cost, communication_terms, sliced_cost
from mstrain.planner.plan import Product, Products
from mstrain.planner.products import gemms_of, multiplication
from mstrain.simulator.cluster import Device
from mstrain.simulator.costs import ATTENTION_BACKWARD, compute_seconds
from mstrain.simulator.rules import rule_set

CORRECTED = rule_set("corrected")
FLASH_BLOCK = 128  # tokens; sequences of whole blocks in 16 bits use a kernel that skips what is masked


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass of one microbatch through some layers on one device."""

    gemm: float = 0.0
    exposed: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def seconds(self) -> float:
        return self.gemm + self.exposed + self.attention + self.elementwise

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(a + b for a, b in zip(self.values, other.values)))

    def __mul__(self, times: float) -> "Pass":
        return Pass(*(times * value for value in self.values))

    @property
    def values(self) -> tuple[float, float, float, float]:
        return self.gemm, self.exposed, self.attention, self.elementwise


@dataclass(frozen=True)
class Work:
    """Forward and backward pass of one layer and of the output projection with its loss."""

    forward: Pass
    backward: Pass
    head_forward: Pass
    head_backward: Pass


def flash(model: ModelConfig, seq: int, dtype_bytes: int) -> bool:
    """Whether attention keeps no scores and skips the masked half."""
    extras = model.position == "alibi" or (model.window is not None and model.window < seq)
    return not extras and dtype_bytes == 2 and model.head_dim % 8 == 0 and seq % FLASH_BLOCK == 0


def attention_flops(model: ModelConfig, tokens: int, seq: int, dtype_bytes: int) -> float:
    """Forward FLOPs of the scores and the weighted sum of values."""
    seen = seq / 2 if flash(model, seq, dtype_bytes) else seq
    return 4.0 * tokens * seen * model.heads * model.head_dim


def elementwise_values(model: ModelConfig) -> tuple[int, int]:
    """Values moved per token by what a layer does beside products and attention: (norms and residuals,
    MLP).
    """
    around = 2 * (2 * model.width + 3 * model.width)  # per half: a norm reads and writes, a sum reads two
    inside = model.mlp_dim * (3 if model.gated else 2)
    return around, inside


def gemm_costs(product: Product, constants: Constants, device: Device) -> tuple[Cost, Cost]:
    """(forward, backward) of one projection on one device."""
    terms = {term.gemm: term for term in communication_terms(product.layout, constants)}
    costs = []
    for gemm in gemms_of(product):
        seconds = product.slices * compute_seconds(CORRECTED, multiplication(product, gemm), device)
        costs.append(sliced_cost((terms[gemm.dataflow],), seconds, product.slices, constants.overlap))
    forward, *backward = costs
    return forward, Cost(*(sum(getattr(cost, f.name) for cost in backward) for f in fields(Cost)))


@lru_cache(maxsize=1 << 16)
def layer_work(
    model: ModelConfig, products: Products, seq: int, constants: Constants, device: Device
) -> Work:
    """Work of one microbatch on `device`, whose flops are those of GEMMs."""
    block = [gemm_costs(product, constants, device) for product in products.block]
    layout = products.block[0].layout
    devices, size = layout.rows * layout.cols, layout.dtype_bytes
    values = sum(elementwise_values(model)) * layout.tokens / devices
    moved = size * values / device.memory_bandwidth
    attention = attention_flops(model, layout.tokens, seq, size) / devices / device.flops
    forward = Pass(sum(f.compute for f, _ in block), sum(f.exposed for f, _ in block), attention, moved)
    backward = Pass(
        sum(b.compute for _, b in block),
        sum(b.exposed for _, b in block),
        ATTENTION_BACKWARD * attention,
        2 * moved,
    )
    ahead, behind = gemm_costs(products.head, constants, device)
    logits = 4 * layout.tokens * products.head.layout.projection.out_dim / devices / device.memory_bandwidth
    return Work(
        forward,
        backward,
        Pass(ahead.compute, ahead.exposed, 0.0, 2 * logits),
        Pass(behind.compute, behind.exposed, 0.0, 2 * logits),
    )
