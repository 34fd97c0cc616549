"""Seconds of the parts of one stage: products, attention, element-wise work, per microbatch.

Products cost what `mstrain.parallel.product_cost` says: MeshSlice overlaps its slices (paper section 3.2.2), and of the
other collectives is hidden what compiled steps of that algorithm hide (`mstrain.hardware.overlap`). Attention runs at
the rate of GEMMs; element-wise work at the bandwidth of memory, each value read and written once.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from mstrain.hardware import chip_named
from mstrain.hardware.constants import Constants
from mstrain.hardware.efficiency import efficiency_of
from mstrain.hardware.gemm_times import gemm_seconds
from mstrain.hardware.overlap import hidden_shares
from mstrain.models.config import ModelConfig
from mstrain.parallel.product_cost import pass_costs
from mstrain.planner.plan import Product, Products
from mstrain.planner.products import gemms_of, local_dims
from mstrain.simulator.cluster import Device
from mstrain.simulator.costs import ATTENTION_BACKWARD

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
        return sum(self.values)

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

    def recomputed(self, remat: str) -> Pass:
        """What the backward pass of a layer computes again."""
        if remat == "full":
            return self.forward
        return Pass(elementwise=self.forward.elementwise) if remat == "dots" else Pass()


def flash(model: ModelConfig, seq: int, dtype_bytes: int) -> bool:
    """Whether attention keeps no scores and skips the masked half."""
    extras = model.position == "alibi" or (model.window is not None and model.window < seq)
    return not extras and dtype_bytes == 2 and model.head_dim % 8 == 0 and seq % FLASH_BLOCK == 0


def elementwise_values(model: ModelConfig) -> tuple[int, int]:
    """Values moved per token by what a layer does beside products and attention: (norms and residuals, MLP)."""
    around = 2 * (2 * model.width + 3 * model.width)  # per half: a norm reads and writes, a sum reads two
    inside = model.mlp_dim * (3 if model.gated else 2)
    return around, inside


@lru_cache(maxsize=1 << 16)
def layer_work(model: ModelConfig, products: Products, seq: int, constants: Constants, device: Device) -> Work:
    """Work of one microbatch on `device`, whose flops are those of GEMMs; of a layer, the mean over all."""
    layout = products.block[0].layout
    devices, size = layout.rows * layout.cols, layout.dtype_bytes
    moved = size * sum(elementwise_values(model)) * layout.tokens / devices / device.memory_bandwidth
    seen = seq / 2 if flash(model, seq, size) else seq
    attention = 4.0 * layout.tokens * seen * model.heads * model.head_dim / devices
    attention /= _attention_rate(model, seq, layout, constants, device)
    forward, backward = Pass(0.0, 0.0, attention, moved), Pass(0.0, 0.0, ATTENTION_BACKWARD * attention, 2 * moved)
    for block, share in products.groups:
        for product in block:
            ahead, behind = _passes(product, _shaped(product, constants, device), device.kind)
            forward, backward = forward + ahead * share, backward + behind * share
    ahead, behind = _passes(products.head, _shaped(products.head, constants, device), device.kind)
    logits = 4 * layout.tokens * products.head.layout.projection.out_dim / devices / device.memory_bandwidth
    loss = Pass(elementwise=2 * logits)
    return Work(forward, backward, ahead + loss, behind + loss)


def _attention_rate(model: ModelConfig, seq: int, layout, constants: Constants, device: Device) -> float:
    """FLOP/s of attention: that of products, or of the fused kernel where the table of efficiencies has one."""
    if not (constants.shaped and flash(model, seq, layout.dtype_bytes)):
        return device.flops
    chip = chip_named(device.kind)
    return efficiency_of(chip).attention_rate(chip, model.head_dim)


@lru_cache(maxsize=1 << 16)
def _shaped(product: Product, constants: Constants, device: Device) -> Constants:
    """Constants whose rate is that of this product's three local GEMMs."""
    if not (constants.shaped or constants.gemm):
        return constants
    chip, layout = chip_named(device.kind), product.layout
    dtype = "bf16" if layout.dtype_bytes == 2 else "f32"
    dims = [local_dims(gemm, layout.rows, layout.cols, product.slices) for gemm in gemms_of(product)]
    if constants.gemm:
        seconds = sum(gemm_seconds(constants.gemm, *each) for each in dims)
    else:
        seconds = sum(efficiency_of(chip).gemm_seconds(chip, each, dtype) for each in dims)
    return replace(constants, flops=sum(2.0 * math.prod(each) for each in dims) / seconds)


def _passes(product: Product, constants: Constants, generation: str) -> tuple[Pass, Pass]:
    links = constants.along(product.layout.rows, product.layout.cols, product.turned)
    hidden = hidden_shares(generation, product.algorithm)
    forward, backward = (Pass(cost.compute, cost.exposed) for cost in
                         pass_costs(product.layout, product.slices, links, hidden))  # fmt: skip
    return forward, backward
