"""What one device does inside a product: multiply, all_gather, reduce_scatter, ppermute.

Every function runs inside `jax.shard_map`. A collective over one device is no collective: it returns its input.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from mstrain.gemm.lowering import LoweringOptions

Axes = tuple[str, ...]

NN = ((1,), (0,))  # a @ b
NT = ((1,), (1,))  # a @ b.T
TN = ((0,), (0,))  # a.T @ b


def dot(a, b, contract, dtype=None):
    """Matrix product with float32 accumulation, rounded once to `dtype` (the inputs' by default)."""
    y = lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)
    return y.astype(dtype or a.dtype)


def axis_size(axes: Axes) -> int:
    return lax.axis_size(axes) if axes else 1


def axis_index(axes: Axes):
    return lax.axis_index(axes) if axes else 0


def all_gather(x, axes: Axes, dim: int):
    """All-gather of the shards of `x` along `axes`, joined on `dim`."""
    if axis_size(axes) == 1:
        return x
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def reduce_scatter(x, axes: Axes, dim: int):
    """Reduce-scatter of the partial sums `x` along `axes`, split on `dim`."""
    if axis_size(axes) == 1:
        return x
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def reduce_scatter_in_ring(partial, size: int, axes: Axes, dim: int):
    """`reduce_scatter` as two rings of permutes, one each way round, half of every block on each.

    `partial(start, width)` gives this device's term of the features [start, start + width) of `size` on `dim`; it is
    asked for a half block when that travels next. A ring of n devices takes n - 1 steps, and sums are rounded to the
    dtype of the terms at every step.
    """
    n, me = axis_size(axes), axis_index(axes)
    width = size // n
    low = width // 2

    def halves(step):
        return partial((me - step) % n * width, low), partial((me + step) % n * width + low, width - low)

    right, left = halves(1)
    for step in range(2, n + 1):
        coming = ppermute(right, axes, 1), ppermute(left, axes, -1)
        right, left = (sent + own for sent, own in zip(coming, halves(step), strict=True))
    return jnp.concatenate([right, left], axis=dim)


def all_reduce(x, axes: Axes):
    axes = tuple(axis for axis in axes if axis_size((axis,)) > 1)
    return lax.psum(x, axes) if axes else x


def constrain_layout(x, lowering: LoweringOptions):
    """x in the plain layout, last dim minor, where `lowering` asks for that; its cotangent, too.

    Elsewhere a compiler may prefer another one.
    """
    if not lowering.row_major:
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def ppermute(x, axes: Axes, by: int):
    """Sends `x` to the device `by` places further on the ring of `axes`."""
    n = axis_size(axes)
    if n == 1:
        return x
    return lax.ppermute(x, axes, [(i, (i + by) % n) for i in range(n)])


def piece(x, dim: int, index: int, count: int):
    """The `index`-th of `count` contiguous pieces of `x` along `dim`."""
    width = x.shape[dim] // count
    return lax.slice_in_dim(x, index * width, (index + 1) * width, axis=dim)
