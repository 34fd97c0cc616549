"""Wang: the collective along the columns is a bidirectional ring of ppermutes that overlap with block products.

Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023; the baseline of the
MeshSlice paper (section 2.3.2). The collective along the rows is whole and exposed. A ring of C devices takes C - 1
steps and sends half of every block in each direction.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.local import (
    NN,
    NT,
    TN,
    all_gather,
    axis_index,
    axis_size,
    dot,
    ppermute,
    reduce_scatter,
    reduce_scatter_in_ring,
)


def os(a, b, rows, cols, slices=1):
    """Y = A B: half blocks of A move around the ring; each is multiplied by its rows of the gathered B."""
    b = all_gather(b.astype(a.dtype), rows, 0)
    products = (
        dot(block, lax.dynamic_slice_in_dim(b, start, block.shape[1], axis=0), NN, jnp.float32)
        for block, start in _circulate(a, 1, cols)
    )
    return functools.reduce(operator.add, products).astype(a.dtype)


def ls(a, b, rows, cols, slices=1):
    """Y = A B^T: half blocks of Y move around the ring and add up each device's partial product."""
    b = all_gather(b.astype(a.dtype), rows, 0)

    def partial(start, width):
        return dot(a, lax.dynamic_slice_in_dim(b, start, width, axis=0), NT)

    return reduce_scatter_in_ring(partial, b.shape[0], cols, 1)


def rs(a, b, rows, cols, slices=1):
    """Y = A^T B: half blocks of A move around the ring, each gives rows of the partial product; then reduce_scatter."""
    y = jnp.zeros((a.shape[1] * axis_size(cols), b.shape[1]), a.dtype)
    for block, start in _circulate(a, 1, cols):
        y = lax.dynamic_update_slice_in_dim(y, dot(block, b, TN), start, axis=0)
    return reduce_scatter(y, rows, 0)


def _circulate(x, dim, axes):
    """Yields (half block, its offset in the gathered dim) for every half block of the ring, starting with its own."""
    n, me = axis_size(axes), axis_index(axes)
    width = x.shape[dim]
    low = width // 2
    right = lax.slice_in_dim(x, 0, low, axis=dim)
    left = lax.slice_in_dim(x, low, width, axis=dim)
    for step in range(n):
        coming = (ppermute(right, axes, 1), ppermute(left, axes, -1)) if step + 1 < n else None
        yield right, ((me - step) % n) * width
        yield left, ((me + step) % n) * width + low
        if coming:
            right, left = coming


ALGORITHM = Algorithm("wang", os, ls, rs)
