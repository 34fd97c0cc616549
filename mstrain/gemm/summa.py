"""SUMMA: in each step, one panel is broadcast from, or reduced to, the devices that own it.

Van de Geijn and Watts, 1997; the dataflows follow the MeshSlice paper, section 2.3.3. There are lcm(rows, columns)
panels, so each panel has one owner along either axis. JAX has no broadcast along a mesh axis: it is an all_reduce of
the owner's panel and of zeros on the other devices. A reduction is an all_reduce of which only the owner keeps the
result.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.local import NN, NT, TN, all_reduce, axis_index, axis_size, dot, piece


def os(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B: broadcast a panel of A along the columns and of B along the rows, multiply, accumulate."""
    panels, b = _panels(rows, cols), b.astype(a.dtype)
    products = (
        dot(_broadcast(a, 1, p, panels, cols), _broadcast(b, -2, p, panels, rows), NN, jnp.float32)
        for p in range(panels)
    )
    return functools.reduce(operator.add, products).astype(a.dtype)


def ls(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B^T: broadcast a panel of B along the rows, multiply, reduce to the owning column."""
    panels, b = _panels(rows, cols), b.astype(a.dtype)
    ys = [dot(a, _broadcast(b, -2, p, panels, rows), NT) for p in range(panels)]
    return _collect(ys, 1, cols)


def rs(a, b, rows, cols, slices=1, dot=dot):
    """Y = A^T B: broadcast a panel of A along the columns, multiply, reduce to the owning row."""
    panels = _panels(rows, cols)
    ys = [dot(_broadcast(a, 1, p, panels, cols), b, TN) for p in range(panels)]
    return _collect(ys, -2, rows)


def _panels(rows, cols):
    return math.lcm(axis_size(rows), axis_size(cols))


def _broadcast(x, dim, panel, panels, axes):
    per_device = panels // axis_size(axes)
    mine, owns = piece(x, dim, panel % per_device, per_device), axis_index(axes) == panel // per_device
    return jax.tree.map(lambda x: all_reduce(jnp.where(owns, x, 0), axes), mine)


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
