"""SUMMA: one panel per step is broadcast (or reduced) from (or to) the devices that own it.

Van de Geijn and Watts, 1997; the dataflows follow the MeshSlice paper, section 2.3.3. With p = lcm(rows, columns)
panels each panel has one owner in either direction. A mesh axis has no native one-to-all, so a broadcast is the sum
over the axis of the owner's panel and zeros elsewhere, and a reduction is a sum of which the owner keeps the
result.
"""

import math

import jax.numpy as jnp

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.local import NN, NT, TN, all_reduce, axis_index, axis_size, dot, piece


def os(a, b, rows, cols, slices=1):
    """Y = A B: broadcast a panel of A along the columns and of B along the rows, multiply, accumulate."""
    panels, y, b = _panels(rows, cols), 0, b.astype(a.dtype)
    for p in range(panels):
        a_p, b_p = _broadcast(a, 1, p, panels, cols), _broadcast(b, 0, p, panels, rows)
        y = y + dot(a_p, b_p, NN, jnp.float32)
    return y.astype(a.dtype)


def ls(a, b, rows, cols, slices=1):
    """Y = A B^T: broadcast a panel of B along the rows, multiply, reduce to the owning column."""
    panels, b = _panels(rows, cols), b.astype(a.dtype)
    ys = [dot(a, _broadcast(b, 0, p, panels, rows), NT) for p in range(panels)]
    return _collect(ys, 1, cols)


def rs(a, b, rows, cols, slices=1):
    """Y = A^T B: broadcast a panel of A along the columns, multiply, reduce to the owning row."""
    panels = _panels(rows, cols)
    ys = [dot(_broadcast(a, 1, p, panels, cols), b, TN) for p in range(panels)]
    return _collect(ys, 0, rows)


def _panels(rows, cols):
    return math.lcm(axis_size(rows), axis_size(cols))


def _broadcast(x, dim, panel, panels, axes):
    per_device = panels // axis_size(axes)
    mine = piece(x, dim, panel % per_device, per_device)
    return all_reduce(jnp.where(axis_index(axes) == panel // per_device, mine, 0), axes)


def _collect(partials, dim, axes):
    per_device = len(partials) // axis_size(axes)
    sums = [all_reduce(y, axes) for y in partials]
    kept = sums[:per_device]
    for owner in range(1, axis_size(axes)):
        theirs = sums[owner * per_device : (owner + 1) * per_device]
        mine = axis_index(axes) == owner
        kept = [jnp.where(mine, new, old) for new, old in zip(theirs, kept, strict=True)]
    return jnp.concatenate(kept, axis=dim)


ALGORITHM = Algorithm("summa", os, ls, rs)
