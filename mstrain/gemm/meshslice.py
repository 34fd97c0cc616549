"""MeshSlice: every collective is split into S partial collectives that overlap with the product of another slice.

MeshSlice paper, section 3.1 and Algorithm 2. Slices are contiguous. This is correct on any mesh because the
row-sharded dim of a weight is stored slice-major (`mstrain.gemm.storage`): slice s gathered over the rows and slice s
gathered over the columns hold the same features in the same order.

The loops are unrolled, because a collective inside a loop body cannot overlap with the product of the next iteration.
The rest of the structure follows from compiled schedules for v4 to tpu7x (`mstrain.compiler`):

* OS: one optimization barrier per step limits prefetching to one slice, so two slices are in memory. Without it the
  compiler starts every all_gather at once. The barrier takes slices, because a barrier on whole operands adds a
  relayout per step. It also keeps each addition fused with its product; otherwise v6e and tpu7x add the last two
  products in a separate pass with a second accumulator.
* LS and RS: reduce_scatter runs along the first dim. Along the last dim the compiler adds a relayout of the whole
  product (v5p, v6e) or emits an all_reduce and a slice (v4, tpu7x), which sends twice the bytes. LS therefore computes
  its column blocks along the first dim, or computes Y^T if the blocks are narrower than the matrix unit.
* LS and RS: a barrier orders the reduce_scatters, which share the same links. Without it the scheduler delays
  products and starts several reduce_scatters at the end, where no product is left to overlap with.
* LS and RS: each slice of the output is written to one buffer when it is complete. A concatenation at the end delays
  the last reduce_scatters.

Options that help on some chips only are in `LoweringOptions`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mstrain.gemm import collective
from mstrain.gemm.algorithm import DATAFLOWS, Algorithm
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
from mstrain.gemm.scheduling import SchedulingGroups

PLAIN = LoweringOptions()


def os(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y = A B: accumulates the products of slices of the contracted dim in float32."""
    if slices == 1:
        return collective.os(a, b, rows, cols, dot=dot)
    return _os(a, b, rows, slices, lowering, dot, lambda a_s, s: all_gather(a_s, cols, 1))


def _os(a, b, rows, slices, lowering, dot, gather):
    """`os` with `gather(a_s, s)` of slice s of A."""
    pieces = [(piece(a, 1, s, slices), _rounded_piece(b, s, slices, a.dtype, lowering)) for s in range(slices)]

    def fetch(s):
        a_s, b_s = pieces[s]
        return gather(a_s, s), all_gather(b_s, rows, -2)

    def add_product(y, operands):
        a_s, b_s = operands
        product = dot(a_s, b_s, NN, jnp.float32)
        return product if y is None else y + product

    ready, y = fetch(0), None
    for s in range(slices - 1):
        coming = fetch(s + 1)
        y = add_product(y, ready)
        # The all_gathers of step s + 2 wait for the product of step s.
        y, pieces[s + 2 : s + 3] = lax.optimization_barrier((y, pieces[s + 2 : s + 3]))
        ready = coming
    return add_product(y, ready).astype(a.dtype)


def ls(a, b, rows, cols, slices, lowering=PLAIN, dot=dot, last_sum: int | None = None):
    """Y = A B^T: all_gather slice s + 1 of B, multiply slice s and reduce_scatter slice s - 1 of Y overlap.

    `last_sum` is the scheduling group of the last reduce_scatter, unless Y is computed transposed.
    """
    if slices == 1:
        return collective.ls(a, b, rows, cols, dot=dot)
    columns, width = axis_size(cols), b.shape[-2] // slices * axis_size(rows)
    if b.ndim == 2 and width // columns % lowering.matrix_unit:
        return constrain_layout(ls_transposed(a, b, rows, cols, slices, lowering).T, lowering)
    a = constrain_layout(a, lowering)

    def multiply(b_s):
        return _columns_below_each_other(columns, a, b_s, lowering, dot)

    return constrain_layout(_ls_pipeline(a, b, rows, cols, slices, lowering, multiply, 1, last_sum), lowering)


def ls_transposed(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y^T = B A^T: `ls` with a transposed result."""
    if slices == 1:
        return collective.ls_transposed(a, b, rows, cols, dot=dot)
    return _ls_pipeline(a, b, rows, cols, slices, lowering, lambda b_s: dot(b_s, a, NT), 0)


def _ls_pipeline(a, b, rows, cols, slices, lowering, multiply, joined, last_sum=None):
    slices_of_y = _pipeline(
        slices,
        fetch=lambda s: all_gather(_rounded_piece(b, s, slices, a.dtype, lowering), rows, -2),
        multiply=lambda b_s, _: multiply(b_s),
        send=lambda y_s, group: constrain_layout(reduce_scatter(y_s, cols, 0, group), lowering),
        last_sum=last_sum,
    )
    return _join(slices_of_y, joined)


def _columns_below_each_other(columns, a, b_s, lowering, dot):
    """a b_s^T as [columns x tokens, features of a column]: block j is the part of column j."""
    if b_s.ndim == 2:
        y_s = dot(a, b_s.reshape(columns, -1, b_s.shape[1]), ((1,), (2,)))  # [tokens, columns, features]
    else:
        y_s = dot(a, b_s, NT)
        y_s = y_s.reshape(len(y_s), columns, -1)
    return constrain_layout(y_s.swapaxes(0, 1), lowering).reshape(columns * len(y_s), -1)


def rs(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y = A^T B: all_gather slice s + 1 of A, multiply slice s and reduce_scatter slice s - 1 of Y overlap."""
    if slices == 1:
        return collective.rs(a, b, rows, cols, dot=dot)

    def fetch(s):
        return all_gather(piece(a, 1, s, slices), cols, 1)

    return _rs(b, rows, slices, lowering, fetch, lambda a_s, b, _: dot(a_s, b, TN))


def _rs(b, rows, slices, lowering, fetch, multiply):
    """`rs` with `fetch(s)`, slice s of A, gathered, and `multiply(a_s, b, s)`."""

    def send(y_s, _):
        part: Any = constrain_layout(y_s, lowering)  # XLA may lay it out by columns, and then sends it by all_reduce
        if not lowering.rs_in_rings:
            return reduce_scatter(part, rows, -2)
        dim = part.ndim - 2
        return reduce_scatter_in_ring(
            lambda start, width: lax.dynamic_slice_in_dim(part, start, width, dim), part.shape[dim], rows, dim
        )

    b = constrain_layout(b, lowering)
    slices_of_y = _pipeline(
        slices,
        fetch=fetch,
        multiply=lambda a_s, s: multiply(a_s, b, s),
        send=send,
    )
    return _join(slices_of_y, -2)


def scheduled(dataflow, groups: SchedulingGroups, x, w, dy, rows, cols, slices, lowering=PLAIN):
    """(dx, dw) of Y = OS(x, w) or LS(x, w) in scheduling groups. For LS every slice of dy is gathered once."""
    if slices == 1:
        return collective.scheduled(dataflow, groups, x, w, dy, rows, cols)
    if dataflow == "os":
        dx = ls(dy, w, rows, cols, slices, lowering, last_sum=groups.last_sum)
        return dx, rs(x, dy, rows, cols, slices, lowering)
    assert dataflow == "ls", f"{dataflow} has no scheduling groups"
    gathered = []

    def gather(dy_s, s):
        gathered.append(all_gather(dy_s, cols, 1, groups.gather(s)))
        return gathered[-1]

    def multiply(dy_s, x, s):
        return dot(dy_s, x, TN, group=groups.product(s))

    dx = _os(dy, w, rows, slices, lowering, dot, gather)
    return dx, _rs(x, rows, slices, lowering, gathered.__getitem__, multiply)


def _rounded_piece(b, s, slices, dtype, lowering):
    """Slice s of B, which may be a float32 weight, cast to `dtype` before it is communicated."""
    if not lowering.opaque_slices or b.dtype == dtype:
        return piece(b, b.ndim - 2, s, slices).astype(dtype)
    height = b.shape[-2] // slices
    begin = lax.optimization_barrier(jnp.int32(s * height))
    return lax.dynamic_slice_in_dim(b, begin, height, axis=b.ndim - 2).astype(dtype)


def _pipeline(slices, fetch, multiply, send, last_sum: int | None = None):
    """Starts fetch(s + 1) before multiply(s) and overlaps send(s - 1) with it; send(s) waits for send(s - 1).

    `send` takes a product and a scheduling group, that of the last one is `last_sum`.
    """
    sent, product, ready = [], None, fetch(0)
    for s in range(slices):
        coming = fetch(s + 1) if s + 1 < slices else None
        if product is not None:
            sent.append(send(product, None))
        product = multiply(ready, s)
        if sent:
            product, sent[-1] = lax.optimization_barrier((product, sent[-1]))
        ready = coming
    return [*sent, send(product, last_sum)]


def _join(pieces, dim):
    """Concatenates the pieces along `dim` by one dynamic_update_slice per piece."""
    shape = list(pieces[0].shape)
    dim %= len(shape)
    width = shape[dim]
    shape[dim] *= len(pieces)
    y = lax.empty(tuple(shape), pieces[0].dtype)
    for s, y_s in enumerate(pieces):
        y = lax.dynamic_update_slice_in_dim(y, y_s, s * width, dim)
    return y


ALGORITHM = Algorithm(
    "meshslice", os, ls, rs, ls_transposed=ls_transposed, scheduled=scheduled, sliced=True, costed=True,
    grouped=DATAFLOWS,
)  # fmt: skip
