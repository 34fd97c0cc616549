"""Products of 8-bit operands: one scale per row of A and per column of B, so that scales factor out of the sum.

With A = diag(s) Q and B = R diag(t), A B = diag(s) (Q R) diag(t): the product of the 8-bit values is summed in int32 or
float32, and the scales multiply the result. A scale is the largest absolute value along the contracted dim, agreed by a
maximum over the mesh axes that shard that dim. So every device rounds an element in the same way, and the result does
not depend on mesh, algorithm or slice count. Where the other dim is communicated, the scales are communicated, too.

The gradient of a result (dy) is rounded stochastically to int8, so that sums of many elements have no bias, or to a
float8 with five bits of exponent. The random bits of an element are a hash of its row and column in the whole matrix
and of its scale, which changes from step to step.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from mstrain.checks import one_of
from mstrain.gemm.local import Axes, axis_index, axis_size
from mstrain.gemm.scaled import Scaled

PRODUCTS = ("bf16", "int8", "fp8")
TRAVEL = ("bf16", "int8")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Which operands of a product have 8 bits.

    Attributes:
      products: `int8` or `fp8` for both operands of every product; `bf16` leaves them in the dtype of the activations.
      travel: `int8` for the operands that are gathered, which are multiplied in the dtype of the activations.
    """

    products: str = "bf16"
    travel: str = "bf16"

    def __post_init__(self):
        one_of("precision", self.products, PRODUCTS)
        one_of("travel", self.travel, TRAVEL)
        if "bf16" not in (self.products, self.travel):
            raise ValueError(
                f"travel={self.travel} has no effect with precision={self.products}, whose operands are gathered in 8 "
                "bits. Type one of them."
            )

    def __str__(self) -> str:
        return f"precision={self.products}" if self.products != "bf16" else f"travel={self.travel}"

    @property
    def is_full(self) -> bool:
        """Whether no operand has 8 bits."""
        return self.products == self.travel == "bf16"

    def dtype(self, gradient: bool):
        """The dtype of an operand with 8 bits, which is the gradient of a result or not."""
        if self.products == "fp8":
            return jnp.float8_e5m2 if gradient else jnp.float8_e4m3fn
        return jnp.int8


@dataclasses.dataclass(frozen=True)
class Operand:
    """What the rounding of one operand depends on.

    Attributes:
      contracted: the dim that the product sums over.
      shards: mesh axes that shard (rows, columns) of the matrix.
      gradient: whether it is the gradient of a result.
    """

    contracted: int
    shards: tuple[Axes, Axes]
    gradient: bool = False


def quantize(x, operand: Operand, precision: Precision, result) -> Scaled:
    """The shard `x` of a matrix in 8 bits, for products of dtype `result`; called in `jax.shard_map`."""
    dtype = jnp.dtype(precision.dtype(operand.gradient))
    peak = jnp.max(jnp.abs(x), axis=operand.contracted).astype(jnp.float32)
    peak = jnp.where(jnp.isnan(peak), jnp.inf, peak)  # a maximum over devices may drop NaN; infinity reaches the result
    if axis_size(axes := operand.shards[operand.contracted]) > 1:
        peak = lax.pmax(peak, axes)
    scale = jnp.where(peak > 0, peak / _LARGEST[dtype.name], 1)
    x_8 = x.astype(jnp.float32) / jnp.expand_dims(scale, operand.contracted)
    if dtype == jnp.int8:
        x_8 = jnp.floor(x_8 + _dither(x_8, peak, operand)) if operand.gradient else jnp.round(x_8)
    return Scaled(x_8.astype(dtype), scale, 1 - operand.contracted, result, precision.products == "bf16")


def _dither(x, peak, operand: Operand):
    """Numbers in [0, 1) that look random, one for each element of the shard `x`."""
    row, column = (
        lax.broadcasted_iota(jnp.uint32, x.shape, dim) + jnp.uint32(axis_index(axes) * x.shape[dim])
        for dim, axes in enumerate(operand.shards)
    )
    seed = lax.bitcast_convert_type(peak, jnp.uint32) >> 16  # rounding on another mesh seldom changes these
    word = row * jnp.uint32(0x9E3779B1) ^ column * jnp.uint32(0x85EBCA77)
    word ^= jnp.expand_dims(seed * jnp.uint32(0xC2B2AE3D), operand.contracted)
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # the finalizer of MurmurHash3
        word = (word ^ (word >> 16)) * jnp.uint32(factor)
    return (word >> 8).astype(jnp.float32) * 2.0**-24
