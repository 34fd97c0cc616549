"""Matrices of 8-bit values with scales, as operands of local products."""

import dataclasses
import functools
from typing import Any

import jax

LONGEST = (2**31 - 1) // 127**2  # elements whose int8 products an int32 can sum


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["free", "dtype", "widened"]
)
@dataclasses.dataclass(frozen=True)
class Scaled:
    """A matrix whose element is a value times the scale of its row or of its column.

    Attributes:
      values: int8 or float8, two dims; more where the dim of the scale is split.
      scale: float32, of the shape of the dims of `values` that a product keeps.
      free: the (first) dim that a product keeps: 0 for a scale per row, 1 for one per column.
      dtype: of the results of products.
      widened: whether products convert the values to `dtype`; otherwise they multiply 8-bit values.
    """

    values: Any
    scale: Any
    free: int
    dtype: Any
    widened: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def astype(self, dtype) -> "Scaled":
        """The same values, for products with results of `dtype`."""
        return dataclasses.replace(self, dtype=dtype)

    def reshape(self, *shape: int) -> "Scaled":
        """With the rows, which have the scales, split into several dims."""
        assert self.free == 0 and shape[-1] == self.shape[-1]
        return dataclasses.replace(self, values=self.values.reshape(shape), scale=self.scale.reshape(shape[:-1]))

    def along(self, dim: int, function) -> "Scaled":
        """`function(array, dim)`, which keeps all elements of the other dim, of the values and of their scales."""
        scale = function(self.scale, 0) if dim == self.free else self.scale
        return dataclasses.replace(self, values=function(self.values, dim), scale=scale)


def check_sum(elements: int) -> None:
    """Raises ValueError where sums of int8 products may overflow."""
    if elements > LONGEST:
        raise ValueError(
            f"precision=int8 would sum {elements} products on a device, and an int32 holds {LONGEST} of the largest. "
            "Type precision=fp8, or a larger mesh=."
        )
