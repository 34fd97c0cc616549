"""Wang: the collective along the columns is a bidirectional ring of ppermutes that overlap with block products.

Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023; the baseline of the
MeshSlice paper (section 2.3.2). The collective along the rows is whole and exposed. A ring of C devices takes C - 1
steps and sends half of every block in each direction.
"""

import functools
import math
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
    join,
    part,
    ppermute,
    reduce_scatter,
    reduce_scatter_in_ring,
)

PARTS = 4  # products of OS after those with the own block, on rings of more devices


def os(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B: half blocks of A move around the ring; each is multiplied by its rows of the gathered B.

    On long rings a product takes the blocks of several steps, because it reads and writes a float32 sum of the size of
    Y: on 16x16 v6e the first MLP product of GPT-3 takes 4.8 ms instead of 10.3.
    """
    b = all_gather(b.astype(a.dtype), rows, -2)
    blocks, steps = list(_circulate(a, 1, cols)), axis_size(cols) - 1
    together = 1 if steps < PARTS else 2 * math.ceil(steps / PARTS)
    parts = [[block] for block in blocks[:2]]
    parts += [blocks[i : i + together] for i in range(2, len(blocks), together)]

    def product(blocks):
        a_part = join([block for block, _ in blocks], 1)
        b_part = join([part(b, -2, start, block.shape[1]) for block, start in blocks], -2)
        return dot(a_part, b_part, NN, jnp.float32)

    return functools.reduce(operator.add, map(product, parts)).astype(a.dtype)


def ls(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B^T: half blocks of Y move around the ring and add up each device's partial product."""
    b = all_gather(b.astype(a.dtype), rows, -2)

    def partial(start, width):
        return dot(a, part(b, -2, start, width), NT)

    return reduce_scatter_in_ring(partial, b.shape[-2], cols, 1)


def rs(a, b, rows, cols, slices=1, dot=dot):
    """Y = A^T B: half blocks of A move around the ring, each gives rows of the partial product; then reduce_scatter."""
    y = None
    for block, start in _circulate(a, 1, cols):
        rows_of_y = dot(block, b, TN)
        y = jnp.zeros((*rows_of_y.shape[:-2], a.shape[1] * axis_size(cols), b.shape[1]), a.dtype) if y is None else y
        y = lax.dynamic_update_slice_in_dim(y, rows_of_y, start, axis=y.ndim - 2)
    return reduce_scatter(y, rows, -2)


def _circulate(x, dim, axes):
    """Yields (half block, its offset in the gathered dim) for every half block of the ring, starting with its own."""
    n, me = axis_size(axes), axis_index(axes)
    width = x.shape[dim]
    low = width // 2
    right, left = part(x, dim, 0, low), part(x, dim, low, width - low)
    for step in range(n):
        coming = (ppermute(right, axes, 1), ppermute(left, axes, -1)) if step + 1 < n else None
        yield right, ((me - step) % n) * width
        yield left, ((me + step) % n) * width + low
        if coming:
            right, left = coming


ALGORITHM = Algorithm("wang", os, ls, rs)
