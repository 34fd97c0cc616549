"""The parts of MeshSlice's dataflows on one device: slices of operands and results, and a pipeline over them.

The structure is explained in `mstrain.gemm.meshslice`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from mstrain.gemm.local import (
    NT,
    all_gather,
    axis_size,
    constrain_layout,
    piece,
    reduce_scatter,
    reduce_scatter_in_ring,
)


def rounded_piece(b, s, slices, dtype, lowering):
    """Slice s of B, which may be a float32 weight, cast to `dtype` before it is communicated."""
    if not lowering.opaque_slices or b.dtype == dtype:
        return piece(b, b.ndim - 2, s, slices).astype(dtype)
    height = b.shape[-2] // slices
    begin = lax.optimization_barrier(jnp.int32(s * height))
    return lax.dynamic_slice_in_dim(b, begin, height, axis=b.ndim - 2).astype(dtype)


def pipeline(slices, fetch, multiply, send):
    """Starts fetch(s + 1) before multiply(s) and overlaps send(s - 1) with it; send(s) waits for send(s - 1)."""
    sent, product, ready = [], None, fetch(0)
    for s in range(slices):
        coming = fetch(s + 1) if s + 1 < slices else None
        if product is not None:
            sent.append(send(product))
        product = multiply(ready)
        if sent:
            product, sent[-1] = lax.optimization_barrier((product, sent[-1]))
        ready = coming
    return [*sent, send(product)]


class LsParts(NamedTuple):
    """The steps of `ls` in slices: fetch(s) of B, multiply(b_s), send(y_s), and join of what was sent."""

    fetch: Callable
    multiply: Callable
    send: Callable
    join: Callable


def ls_parts(a, b, rows, cols, slices, lowering, dot) -> LsParts:
    """Those of Y = A B^T; `join` returns Y."""
    columns, width = axis_size(cols), b.shape[-2] // slices * axis_size(rows)
    if b.ndim == 2 and width // columns % lowering.matrix_unit:
        return transposed_ls_parts(a, b, rows, cols, slices, lowering, dot)
    a = constrain_layout(a, lowering)
    return transposed_ls_parts(a, b, rows, cols, slices, lowering, dot)._replace(
        multiply=lambda b_s: _columns_below_each_other(columns, a, b_s, lowering, dot),
        join=lambda sent: constrain_layout(join(sent, 1), lowering),
    )


def transposed_ls_parts(a, b, rows, cols, slices, lowering, dot) -> LsParts:
    """Those that compute blocks of Y^T; `join` returns Y."""
    return LsParts(
        fetch=lambda s: all_gather(rounded_piece(b, s, slices, a.dtype, lowering), rows, -2),
        multiply=lambda b_s: dot(b_s, a, NT),
        send=lambda y_s: constrain_layout(reduce_scatter(y_s, cols, 0), lowering),
        join=lambda sent: constrain_layout(join(sent, 0).T, lowering),
    )


def _columns_below_each_other(columns, a, b_s, lowering, dot):
    """a b_s^T as [columns x tokens, features of a column]: block j is the part of column j."""
    if b_s.ndim == 2:
        y_s = dot(a, b_s.reshape(columns, -1, b_s.shape[1]), ((1,), (2,)))  # [tokens, columns, features]
    else:
        y_s = dot(a, b_s, NT)
        y_s = y_s.reshape(len(y_s), columns, -1)
    return constrain_layout(y_s.swapaxes(0, 1), lowering).reshape(columns * len(y_s), -1)


def send_rows(y_s, rows, lowering):
    """Reduce-scatter of a slice of `rs` along the rows."""
    if not lowering.rs_in_rings:
        return reduce_scatter(y_s, rows, -2)
    dim = y_s.ndim - 2
    return reduce_scatter_in_ring(
        lambda start, width: lax.dynamic_slice_in_dim(y_s, start, width, dim), y_s.shape[dim], rows, dim
    )


def join(pieces, dim):
    """Concatenates the pieces along `dim` by one dynamic_update_slice per piece."""
    shape = list(pieces[0].shape)
    dim %= len(shape)
    width = shape[dim]
    shape[dim] *= len(pieces)
    y = lax.empty(tuple(shape), pieces[0].dtype)
    for s, y_s in enumerate(pieces):
        y = lax.dynamic_update_slice_in_dim(y, y_s, s * width, dim)
    return y
