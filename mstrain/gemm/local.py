"""Per-device operations of a product: dot, all_gather, reduce_scatter, all_reduce, ppermute.

Every function is called inside `jax.shard_map`. A collective over one device returns its input. Matrices are arrays, or
`Scaled` with 8-bit values, whose scales are moved and cut with them. `group` is a scheduling group's id or None.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from mstrain.gemm.lowering import LoweringOptions
from mstrain.gemm.scaled import Scaled, check_sum
from mstrain.gemm.scheduling import in_group

Axes = tuple[str, ...]

NN = ((1,), (0,))  # a @ b
NT = ((1,), (1,))  # a @ b.T
TN = ((0,), (0,))  # a.T @ b


def dot(a, b, contract, dtype=None, group: int | None = None):
    """Matrix product with float32 accumulation (int32 of int8), rounded once to `dtype` (the inputs' by default)."""
    in_8_bits = all(isinstance(x, Scaled) and not x.widened for x in (a, b))
    left, right = (_values(x, in_8_bits) for x in (a, b))
    sums = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    if sums == jnp.int32:
        check_sum(left.shape[contract[0][0]])
    with in_group(group):
        y = lax.dot_general(left, right, (contract, ((), ())), preferred_element_type=sums)
    if isinstance(a, Scaled):
        y = y * a.scale.reshape(a.scale.shape + (1,) * (y.ndim - a.scale.ndim))
    if isinstance(b, Scaled):
        y = y * b.scale
    return y.astype(dtype or a.dtype)


def rounded_dot(a, b, contract, dtype=None):
    """`dot`, rounded to the inputs' dtype by the kernel that sums in float32.

    For GPUs: XLA lets cuBLAS write the sums of `dot`, and rounds them in a kernel of its own.
    """
    if isinstance(a, Scaled) or isinstance(b, Scaled) or a.dtype != b.dtype or dtype not in (None, a.dtype):
        return dot(a, b, contract, dtype)
    return lax.dot_general(a, b, (contract, ((), ())))


def _values(x, in_8_bits: bool) -> jax.Array:
    """What a product multiplies."""
    if not isinstance(x, Scaled):
        return x
    return x.values if in_8_bits else x.values.astype(x.dtype)


def axis_size(axes: Axes) -> int:
    return lax.axis_size(axes) if axes else 1


def axis_index(axes: Axes):
    return lax.axis_index(axes) if axes else 0


def all_gather(x, axes: Axes, dim: int, group: int | None = None):
    """All-gather of the shards of `x` along `axes`, joined on `dim`."""
    if axis_size(axes) == 1:
        return x
    if group is not None:
        x, dim = x[None], dim % x.ndim + 1  # else XLA may move the annotation to a reshape, which it fuses elsewhere
        with in_group(group):
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return x[0]
    return _along(x, dim, lambda x, dim: lax.all_gather(x, axes, axis=dim, tiled=True))


def all_gather_among(x, axes: Axes, dim: int, count: int):
    """`all_gather` among each `count` consecutive devices along `axes`; they receive the same result."""
    size = axis_size(axes)
    if count == size:
        return all_gather(x, axes, dim)
    groups = [[*range(first, first + count)] for first in range(0, size, count)]
    return lax.all_gather(x, axes, axis=dim, tiled=True, axis_index_groups=groups)


def reduce_scatter(x, axes: Axes, dim: int, group: int | None = None):
    """Reduce-scatter of the partial sums `x` along `axes`, split on `dim`."""
    if axis_size(axes) == 1:
        return x
    dim %= x.ndim
    if dim and len(x) == 1:  # XLA would move a leading dim of one, as of one expert, behind the dim that is split
        return reduce_scatter(x[0], axes, dim - 1, group)[None]
    with in_group(group):
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def reduce_scatter_in_ring(partial, size: int, axes: Axes, dim: int):
    """`reduce_scatter` as two rings of ppermutes in opposite directions, each with half of every block.

    `partial(start, width)` returns this device's partial sum of the elements [start, start + width) of `size` along
    `dim`. It is called for each half block just before that is sent. A ring of n devices takes n - 1 steps, and sums
    are rounded to the dtype of the partial sums in every step.
    """
    n, me = axis_size(axes), axis_index(axes)
    width = size // n
    low = width // 2

    def halves(step):
        return partial((me - step) % n * width, low), partial((me + step) % n * width + low, width - low)

    right, left = halves(1)
    for step in range(2, n + 1):
        coming = ppermute(right, axes, 1), ppermute(left, axes, -1)
        right, left = (received + own for received, own in zip(coming, halves(step), strict=True))
    return jnp.concatenate([right, left], axis=dim)


def all_reduce(x, axes: Axes):
    axes = tuple(axis for axis in axes if axis_size((axis,)) > 1)
    return lax.psum(x, axes) if axes else x


def constrain_layout(x, lowering: LoweringOptions):
    """Constrains x and its cotangent to the row-major layout if `lowering.row_major`; otherwise returns x.

    Without the constraint the compiler chooses the layout.
    """
    if isinstance(x, Scaled):
        return dataclasses.replace(x, values=constrain_layout(x.values, lowering))
    if not lowering.row_major:
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def ppermute(x, axes: Axes, by: int):
    """Sends `x` to the device `by` positions later in the ring along `axes`."""
    n = axis_size(axes)
    if n == 1:
        return x
    return exchange(x, axes, [(i, (i + by) % n) for i in range(n)])


def exchange(x, axes: Axes, pairs: list[tuple[int, int]]):
    """Sends `x` from the first to the second device of every pair along `axes`."""
    return jax.tree.map(lambda part: lax.ppermute(part, axes, pairs), x)


def piece(x, dim: int, index: int, count: int):
    """The `index`-th of `count` contiguous pieces of `x` along `dim`."""
    width = x.shape[dim] // count
    return part(x, dim, index * width, width)


def part(x, dim: int, start, width: int):
    """The elements [start, start + width) of `x` along `dim`; `start` may be an array."""
    if isinstance(start, int):
        return _along(x, dim, lambda x, dim: lax.slice_in_dim(x, start, start + width, axis=dim))
    return _along(x, dim, lambda x, dim: lax.dynamic_slice_in_dim(x, start, width, axis=dim))


def join(parts, dim: int):
    """Concatenates parts of one matrix along `dim`."""
    first = parts[0]
    if not isinstance(first, Scaled):
        return jnp.concatenate(parts, axis=dim)
    values = jnp.concatenate([x.values for x in parts], axis=dim)
    scale = jnp.concatenate([x.scale for x in parts]) if dim % first.ndim == first.free else first.scale
    return dataclasses.replace(first, values=values, scale=scale)


def _along(x, dim: int, function) -> Any:
    """`function(array, dim)` of an array, or of both parts of a `Scaled`."""
    dim %= x.ndim
    return x.along(dim, function) if isinstance(x, Scaled) else function(x, dim)
