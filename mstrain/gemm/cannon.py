"""Cannon: skew by point-to-point shifts, then multiply and rotate, on a square mesh.

Cannon, 1969; the stationary-input forms follow the MeshSlice paper, section 2.3.2. Only permutes travel: one to
skew each moving matrix, n - 1 rotations, and for the flows whose output moves one more to bring it home.
"""

import jax.numpy as jnp
from jax import lax

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.local import NN, NT, TN, axis_size, dot, ppermute
from mstrain.mesh import AXES


def os(a, b, rows, cols, slices=1):
    """Y = A B: A rotates along the columns, B along the rows."""
    n = _side(rows, cols)
    a = _move(a, rows, cols, lambda i, j: (i, j - i))
    b = _move(b.astype(a.dtype), rows, cols, lambda i, j: (i - j, j))
    y = dot(a, b, NN, jnp.float32)
    for _ in range(1, n):
        a, b = ppermute(a, cols, -1), ppermute(b, rows, -1)
        y = y + dot(a, b, NN, jnp.float32)
    return y.astype(a.dtype)


def ls(a, b, rows, cols, slices=1):
    """Y = A B^T: B rotates along the rows, Y along the columns; device (i, k) meets Y_i,i+k+t in step t."""
    n = _side(rows, cols)
    b = _move(b.astype(a.dtype), rows, cols, lambda i, j: (i - j, j))
    y = dot(a, b, NT)
    for _ in range(1, n):
        b, y = ppermute(b, rows, -1), ppermute(y, cols, -1)
        y = y + dot(a, b, NT)
    return _move(y, rows, cols, lambda i, j: (i, i + j - 1))


def rs(a, b, rows, cols, slices=1):
    """Y = A^T B: A rotates along the columns, Y along the rows; device (k, j) meets Y_k+j+t,j in step t."""
    n = _side(rows, cols)
    a = _move(a, rows, cols, lambda i, j: (i, j - i))
    y = dot(a, b, TN)
    for _ in range(1, n):
        a, y = ppermute(a, cols, -1), ppermute(y, rows, -1)
        y = y + dot(a, b, TN)
    return _move(y, rows, cols, lambda i, j: (i + j - 1, j))


def _side(rows, cols):
    n = axis_size(rows)
    assert n == axis_size(cols), "plans check that Cannon's mesh is square"
    return n


def _move(x, rows, cols, destination):
    """Sends the block of device (i, j) to `destination(i, j)`, taken modulo the side of the mesh."""
    n = axis_size(rows)
    if n == 1:
        return x
    # A permute over two mesh axes counts devices in the mesh's own order, whichever of them plays the rows.
    axes = tuple(sorted((*rows, *cols), key=AXES.index))
    row_first = axes[0] in rows

    def number(i, j):
        i, j = i % n, j % n
        return i * n + j if row_first else j * n + i

    pairs = [(number(i, j), number(*destination(i, j))) for i in range(n) for j in range(n)]
    return lax.ppermute(x, axes, pairs)


ALGORITHM = Algorithm("cannon", os, ls, rs, square=True)
