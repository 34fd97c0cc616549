"""MeshSlice's two gradients of a product in one pipeline of slices: what both need is gathered once, and collectives
of one overlap with products of the other.

Both slice the same dim of the matrix that they gather, so slice s of one follows slice s of the other. The results are
bit by bit those of the two dataflows one after the other.

* Dataflow `ls`: dx = OS(dy, w) and dw = RS(dy, x) gather the same slices of dy along the columns.
* Dataflow `os`: dx = LS(dy, w) and dw = RS(x, dy) use the links of the columns in turn: a slice of x is gathered while
  LS multiplies, a slice of dx is reduce-scattered while RS multiplies.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mstrain.gemm.local import NN, TN, all_gather, constrain_layout, piece
from mstrain.gemm.slices import join, ls_parts, rounded_piece, send_rows


def of_dataflow(dataflow: str):
    """The function of (dx, dw) for a product of `dataflow`; None if they are computed one after the other."""
    return {"os": ls_rs, "ls": os_rs}.get(dataflow)


def os_rs(dy, w, x, rows, cols, slices, lowering, dots):
    """(dx, dw) = (dy W, dy^T X) of Y = X W^T on one device; `dots` are the local products of the two."""
    x = constrain_layout(x, lowering)
    pieces = [(piece(dy, 1, s, slices), rounded_piece(w, s, slices, dy.dtype, lowering)) for s in range(slices)]

    def fetch(s):
        dy_s, w_s = pieces[s]
        return all_gather(dy_s, cols, 1), all_gather(w_s, rows, -2)

    sent, dw_s = [], None
    dx: Any = None
    ready: Any = fetch(0)
    for s in range(slices):
        coming = fetch(s + 1) if s + 1 < slices else None
        if dw_s is not None:
            sent.append(send_rows(dw_s, rows, lowering))
        dy_s, w_s = ready
        product = dots[0](dy_s, w_s, NN, jnp.float32)
        dx = product if dx is None else dx + product
        dw_s = dots[1](dy_s, x, TN)
        if sent:
            dw_s, sent[-1] = lax.optimization_barrier((dw_s, sent[-1]))
        # The all_gathers of step s + 2 wait for the products of step s.
        dx, dw_s, pieces[s + 2 : s + 3] = lax.optimization_barrier((dx, dw_s, pieces[s + 2 : s + 3]))
        ready = coming
    return dx.astype(dy.dtype), join([*sent, send_rows(dw_s, rows, lowering)], -2)


def ls_rs(dy, w, x, rows, cols, slices, lowering, dots):
    """(dx, dw) = (dy W^T, X^T dy) of Y = X W on one device; `dots` are the local products of the two."""
    dy = constrain_layout(dy, lowering)
    left = ls_parts(dy, w, rows, cols, slices, lowering, dots[0])
    pieces = [piece(x, 1, s, slices) for s in range(slices)]
    sent, ready = ([], []), (left.fetch(0), all_gather(pieces[0], cols, 1))
    for s in range(slices):
        w_s, x_s = ready
        dx_s = left.multiply(w_s)
        if s:
            dx_s, sent[0][-1] = lax.optimization_barrier((dx_s, sent[0][-1]))
        else:  # starts to gather x and w together
            dx_s, x_s = lax.optimization_barrier((dx_s, x_s))
        sent[0].append(left.send(dx_s))
        ready = (left.fetch(s + 1), all_gather(pieces[s + 1], cols, 1)) if s + 1 < slices else None
        dw_s = dots[1](x_s, dy, TN)
        if s:
            dw_s, sent[1][-1] = lax.optimization_barrier((dw_s, sent[1][-1]))
        # Products alternate, and the all_gathers of step s + 2 wait for those of step s.
        dw_s, ready, pieces[s + 2 : s + 3] = lax.optimization_barrier((dw_s, ready, pieces[s + 2 : s + 3]))
        sent[1].append(send_rows(dw_s, rows, lowering))
    return left.join(sent[0]), join(sent[1], -2)
