"""Cannon: skew both moving matrices, then multiply and shift n - 1 times, on a square mesh of n x n devices.

Cannon, 1969; the input-stationary dataflows follow the MeshSlice paper, section 2.3.2. All communication is ppermute:
one to skew each moving matrix, n - 1 shifts, and one more to return an output that moves.
"""

import jax.numpy as jnp

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.local import NN, NT, TN, axis_size, dot, exchange, ppermute
from mstrain.mesh import AXES


def os(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B: A shifts along the columns, B along the rows."""
    n = _side(rows, cols)
    a = _move(a, rows, cols, lambda i, j: (i, j - i))
    b = _move(b.astype(a.dtype), rows, cols, lambda i, j: (i - j, j))
    y = dot(a, b, NN, jnp.float32)
    for _ in range(1, n):
        a, b = ppermute(a, cols, -1), ppermute(b, rows, -1)
        y = y + dot(a, b, NN, jnp.float32)
    return y.astype(a.dtype)


def ls(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B^T: B shifts along the rows, Y along the columns; device (i, k) holds Y_i,i+k+t in step t."""
    n = _side(rows, cols)
    b = _move(b.astype(a.dtype), rows, cols, lambda i, j: (i - j, j))
    y = dot(a, b, NT)
    for _ in range(1, n):
        b, y = ppermute(b, rows, -1), ppermute(y, cols, -1)
        y = y + dot(a, b, NT)
    return _move(y, rows, cols, lambda i, j: (i, i + j - 1))


def rs(a, b, rows, cols, slices=1, dot=dot):
    """Y = A^T B: A shifts along the columns, Y along the rows; device (k, j) holds Y_k+j+t,j in step t."""
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
    # A ppermute over two mesh axes numbers devices in mesh order, whichever axis is the grid's rows.
    axes = tuple(sorted((*rows, *cols), key=AXES.index))
    row_first = axes[0] in rows

    def number(i, j):
        i, j = i % n, j % n
        return i * n + j if row_first else j * n + i

    pairs = [(number(i, j), number(*destination(i, j))) for i in range(n) for j in range(n)]
    return exchange(x, axes, pairs)


ALGORITHM = Algorithm("cannon", os, ls, rs, square=True)
