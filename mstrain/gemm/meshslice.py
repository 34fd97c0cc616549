"""MeshSlice: every collective cut into S partial ones that travel while the neighbouring slice multiplies.

MeshSlice paper, section 3.1 and Algorithm 2. Slices are contiguous here, which is right on any mesh because the row-sharded
dim of a weight is stored slice-major (`mstrain.gemm.storage`): slice s gathered over the rows and slice s gathered
over the columns then hold the same features in the same order.

The loops are unrolled, as a collective inside a loop body cannot overlap with the next iteration's product. In the
output-stationary flow a barrier per step keeps the gathers one step ahead and not more, which bounds the memory to
two slices; without it the compiler hoists every gather to the front.
"""

import jax.numpy as jnp
from jax import lax

from mstrain.gemm import collective
from mstrain.gemm.local import NN, NT, TN, dot, gather, piece, scatter


def os(a, b, rows, cols, slices):
    """Y = A B, accumulated over the slices of the contracted dim in float32."""
    if slices == 1:
        return collective.os(a, b, rows, cols)

    def fetch(s):
        return gather(piece(a, 1, s, slices), cols, 1), gather(piece(b, 0, s, slices), rows, 0)

    ready, y = fetch(0), None
    for s in range(slices):
        coming = fetch(s + 1) if s + 1 < slices else None
        product = dot(*ready, NN, jnp.float32)
        y = product if y is None else y + product
        if s + 2 < slices:  # the gathers of step s + 2 wait for the product of step s
            y, a, b = lax.optimization_barrier((y, a, b))
        ready = coming
    return y.astype(a.dtype)


def ls(a, b, rows, cols, slices):
    """Y = A B^T: gather slice s + 1 of B | multiply slice s | scatter slice s - 1 of Y."""
    slices_of_y = _pipeline(
        slices,
        fetch=lambda s: gather(piece(b, 0, s, slices), rows, 0),
        multiply=lambda b_s: dot(a, b_s, NT),
        send=lambda y_s: scatter(y_s, cols, 1),
    )
    return jnp.concatenate(slices_of_y, axis=1) if slices > 1 else slices_of_y[0]


def rs(a, b, rows, cols, slices):
    """Y = A^T B: gather slice s + 1 of A | multiply slice s | scatter slice s - 1 of Y."""
    slices_of_y = _pipeline(
        slices,
        fetch=lambda s: gather(piece(a, 1, s, slices), cols, 1),
        multiply=lambda a_s: dot(a_s, b, TN),
        send=lambda y_s: scatter(y_s, rows, 0),
    )
    return jnp.concatenate(slices_of_y, axis=0) if slices > 1 else slices_of_y[0]


def _pipeline(slices, fetch, multiply, send):
    """Issues fetch(s + 1) before multiply(s), and send(s - 1) beside it."""
    sent, product, ready = [], None, fetch(0)
    for s in range(slices):
        coming = fetch(s + 1) if s + 1 < slices else None
        if product is not None:
            sent.append(send(product))
        product = multiply(ready)
        ready = coming
    return [*sent, send(product)]
