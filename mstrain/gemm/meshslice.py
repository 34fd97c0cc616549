"""MeshSlice: every collective cut into S partial ones that travel while the neighbouring slice multiplies.

MeshSlice paper, section 3.1 and Algorithm 2. Slices are contiguous here, which is right on any mesh because
the row-sharded dim of a weight is stored slice-major (`mstrain.gemm.storage`): slice s gathered over the rows
and slice s gathered over the columns then hold the same features in the same order.

The loops are unrolled, as a collective inside a loop body cannot overlap with the next iteration's product.
What else the form owes to the compilers (read from schedules for v4 to tpu7x, `mstrain.compiler`):

* Output-stationary: a barrier per step keeps the gathers one step ahead and not more, which bounds the memory
  to two slices; without it every gather is hoisted to the front. The barrier holds slices and not whole
  operands, whose layout would otherwise be changed once per step. It also keeps every sum in the product before it:
  the last two products would be added in one pass over both (v6e, tpu7x), with a second accumulator.
* Scattered outputs are scattered along their first dim. Along the last one the whole product changes its
  layout (v5p, v6e) or is summed everywhere and cut (v4, tpu7x), which moves twice the bytes. LS therefore computes the
  blocks of its columns below each other, and where these are narrower than the matrix unit, transposed.
* A barrier lets one scatter follow the other, as they share their links anyway. Left alone, schedulers keep products
  back and send them off together when nothing is left to multiply.
* They are written into one buffer slice by slice; joining all of them at the end delays the last scatters.

What is right for some compilers only is in `LoweringOptions`.
"""

import jax.numpy as jnp
from jax import lax

from mstrain.gemm import collective
from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.local import (
    NN,
    NT,
    TN,
    all_gather,
    axis_size,
    constrain_layout,
    dot,
    piece,
    reduce_scatter,
    reduce_scatter_in_ring,
)
from mstrain.gemm.lowering import LoweringOptions

PLAIN = LoweringOptions()


def os(a, b, rows, cols, slices, lowering=PLAIN):
    """Y = A B, accumulated over the slices of the contracted dim in float32."""
    if slices == 1:
        return collective.os(a, b, rows, cols)
    pieces = [(piece(a, 1, s, slices), _rounded_piece(b, s, slices, a.dtype, lowering)) for s in range(slices)]

    def fetch(s):
        a_s, b_s = pieces[s]
        return all_gather(a_s, cols, 1), all_gather(b_s, rows, 0)

    ready, y = fetch(0), None
    for s in range(slices):
        coming = fetch(s + 1) if s + 1 < slices else None
        product = dot(*ready, NN, jnp.float32)
        y = product if y is None else y + product
        if s + 1 < slices:  # the gathers of step s + 2 wait for the product of step s
            y, pieces[s + 2 : s + 3] = lax.optimization_barrier((y, pieces[s + 2 : s + 3]))
        ready = coming
    return y.astype(a.dtype)


def ls(a, b, rows, cols, slices, lowering=PLAIN):
    """Y = A B^T: gather slice s + 1 of B | multiply slice s | scatter slice s - 1 of Y."""
    if slices == 1:
        return collective.ls(a, b, rows, cols)
    columns, width = axis_size(cols), b.shape[0] // slices * axis_size(rows)
    if width // columns % lowering.matrix_unit:
        return constrain_layout(ls_transposed(a, b, rows, cols, slices, lowering).T, lowering)
    a = constrain_layout(a, lowering)

    def multiply(b_s):
        return _columns_below_each_other(columns, a, b_s, lowering)

    return constrain_layout(_ls_pipeline(a, b, rows, cols, slices, lowering, multiply, 1), lowering)


def ls_transposed(a, b, rows, cols, slices, lowering=PLAIN):
    """Y^T = B A^T, as `ls`."""
    if slices == 1:
        return collective.ls(a, b, rows, cols).T
    return _ls_pipeline(a, b, rows, cols, slices, lowering, lambda b_s: dot(b_s, a, NT), 0)


def _ls_pipeline(a, b, rows, cols, slices, lowering, multiply, joined):
    slices_of_y = _pipeline(
        slices,
        fetch=lambda s: all_gather(_rounded_piece(b, s, slices, a.dtype, lowering), rows, 0),
        multiply=multiply,
        send=lambda y_s: constrain_layout(reduce_scatter(y_s, cols, 0), lowering),
    )
    return _join(slices_of_y, joined)


def _columns_below_each_other(columns, a, b_s, lowering):
    """[columns x tokens, features of a column]: block j of a b_s^T is what column j gets."""
    y_s = dot(a, b_s.reshape(columns, -1, b_s.shape[1]), ((1,), (2,)))  # [tokens, columns, features]
    return constrain_layout(y_s.swapaxes(0, 1), lowering).reshape(columns * a.shape[0], -1)


def rs(a, b, rows, cols, slices, lowering=PLAIN):
    """Y = A^T B: gather slice s + 1 of A | multiply slice s | scatter slice s - 1 of Y."""
    if slices == 1:
        return collective.rs(a, b, rows, cols)

    def send(y_s):
        if not lowering.rs_in_rings:
            return reduce_scatter(y_s, rows, 0)
        return reduce_scatter_in_ring(
            lambda start, width: lax.dynamic_slice_in_dim(y_s, start, width), y_s.shape[0], rows, 0
        )

    b = constrain_layout(b, lowering)
    slices_of_y = _pipeline(
        slices,
        fetch=lambda s: all_gather(piece(a, 1, s, slices), cols, 1),
        multiply=lambda a_s: dot(a_s, b, TN),
        send=send,
    )
    return _join(slices_of_y, 0)


def _rounded_piece(b, s, slices, dtype, lowering):
    """Slice s of B, which may be a float32 weight, rounded to `dtype` before it travels."""
    if not lowering.opaque_slices or b.dtype == dtype:
        return piece(b, 0, s, slices).astype(dtype)
    height = b.shape[0] // slices
    begin = lax.optimization_barrier(jnp.int32(s * height))
    return lax.dynamic_slice_in_dim(b, begin, height, axis=0).astype(dtype)


def _pipeline(slices, fetch, multiply, send):
    """Issues fetch(s + 1) before multiply(s), and send(s - 1) beside it; send(s) waits for send(s - 1)."""
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


def _join(pieces, dim):
    """The pieces beside each other along `dim`, each written as soon as it is there."""
    shape = list(pieces[0].shape)
    width = shape[dim]
    shape[dim] *= len(pieces)
    y = lax.empty(tuple(shape), pieces[0].dtype)
    for s, y_s in enumerate(pieces):
        y = lax.dynamic_update_slice_in_dim(y, y_s, s * width, dim)
    return y


ALGORITHM = Algorithm("meshslice", os, ls, rs, ls_transposed=ls_transposed, sliced=True, costed=True)
