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

import jax.numpy as jnp
from jax import lax

from mstrain.gemm import collective, gradients
from mstrain.gemm.algorithm import DATAFLOWS, Algorithm
from mstrain.gemm.local import NN, TN, all_gather, constrain_layout, dot, piece
from mstrain.gemm.lowering import LoweringOptions
from mstrain.gemm.slices import join, ls_parts, pipeline, rounded_piece, send_rows, transposed_ls_parts

PLAIN = LoweringOptions()


def os(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y = A B: accumulates the products of slices of the contracted dim in float32."""
    if slices == 1:
        return collective.os(a, b, rows, cols, dot=dot)
    pieces = [(piece(a, 1, s, slices), rounded_piece(b, s, slices, a.dtype, lowering)) for s in range(slices)]

    def fetch(s):
        a_s, b_s = pieces[s]
        return all_gather(a_s, cols, 1), all_gather(b_s, rows, -2)

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


def ls(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y = A B^T: all_gather slice s + 1 of B, multiply slice s and reduce_scatter slice s - 1 of Y overlap."""
    if slices == 1:
        return collective.ls(a, b, rows, cols, dot=dot)
    parts = ls_parts(a, b, rows, cols, slices, lowering, dot)
    return parts.join(pipeline(slices, parts.fetch, parts.multiply, parts.send))


def ls_transposed(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y^T = B A^T: `ls` with a transposed result."""
    if slices == 1:
        return collective.ls(a, b, rows, cols, dot=dot).T
    parts = transposed_ls_parts(a, b, rows, cols, slices, lowering, dot)
    return join(pipeline(slices, parts.fetch, parts.multiply, parts.send), 0)


def rs(a, b, rows, cols, slices, lowering=PLAIN, dot=dot):
    """Y = A^T B: all_gather slice s + 1 of A, multiply slice s and reduce_scatter slice s - 1 of Y overlap."""
    if slices == 1:
        return collective.rs(a, b, rows, cols, dot=dot)
    b = constrain_layout(b, lowering)
    slices_of_y = pipeline(
        slices,
        fetch=lambda s: all_gather(piece(a, 1, s, slices), cols, 1),
        multiply=lambda a_s: dot(a_s, b, TN),
        send=lambda y_s: send_rows(y_s, rows, lowering),
    )
    return join(slices_of_y, -2)


ALGORITHM = Algorithm(
    "meshslice", os, ls, rs, ls_transposed=ls_transposed, gradients=gradients.of_dataflow, sliced=True, costed=True,
    grouped=DATAFLOWS,
)  # fmt: skip
