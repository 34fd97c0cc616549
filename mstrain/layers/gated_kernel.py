"""The gradient of a gated activation of experts on TPUs, as one kernel.

XLA computes the gradients of [gate, up] apart and joins them in a second pass, because a fusion has one place for its
result. The kernel writes both into their halves of one array: a step of its grid for each, of the same inputs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mstrain.gemm.tiles import LANES, SUBLANES, largest_tile

ROWS, COLUMNS = 256, 1024  # of a block
TILE_ROWS = 2 * SUBLANES  # of 16-bit values


def fits(h) -> bool:
    """Whether [gate, up] has whole tiles for the kernel."""
    return h.dtype == jnp.bfloat16 and len(h) % TILE_ROWS == 0 and h.shape[1] % (2 * LANES) == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def activate_scaled(h, scales, activation: Callable, interpret: bool = False):
    """`activation(gate, up)` times the scale of each row, [R, F], of h = [gate, up], bf16 [R, 2F]; scales [R].

    `interpret` runs the kernel of the gradient on other platforms than TPUs.
    """
    del interpret
    gate, up = jnp.split(h, 2, axis=1)
    return activation(gate, up) * scales[:, None].astype(h.dtype)


def _saved(h, scales, activation, interpret):
    return activate_scaled(h, scales, activation, interpret), (h, scales)


def _gradients(activation, interpret, saved, dy):
    h, scales = saved
    dh, parts = activation_gradient(h, scales, dy, activation, interpret)
    return dh, jnp.sum(parts, axis=1).astype(scales.dtype)


activate_scaled.defvjp(_saved, _gradients)


@functools.partial(jax.jit, static_argnums=(3, 4))
def activation_gradient(h, scales, dy, activation: Callable, interpret: bool = False):
    """(gradient of h [R, 2F], parts of that of scales, float32 [R, LANES], whose sum over lanes it is)."""
    rows, features = dy.shape
    block, width = largest_tile(rows, ROWS, TILE_ROWS), largest_tile(features, COLUMNS)
    columns = features // width

    def half(side):
        return pl.BlockSpec((block, width), lambda i, j, k: (i, j + side * columns))

    of_rows = pl.BlockSpec((block, LANES), lambda i, j, k: (i, 0))
    moved = 2 * (2 * h.size + dy.size) + 8 * LANES * rows
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation),
        grid=(rows // block, columns, 2),
        in_specs=[half(0), half(1), half(0), of_rows],
        out_specs=[pl.BlockSpec((block, width), lambda i, j, k: (i, j + k * columns)), of_rows],
        out_shape=[jax.ShapeDtypeStruct(h.shape, h.dtype), jax.ShapeDtypeStruct((rows, LANES), jnp.float32)],
        scratch_shapes=[pltpu.VMEM((block, width), h.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=2 * dy.size, bytes_accessed=moved),
        interpret=interpret,
        name="activation_gradient",
    )(h, h, dy, jnp.broadcast_to(scales.astype(jnp.float32)[:, None], (rows, LANES)))


def _kernel(gate, up, dy, scales, dh, parts, kept, activation):
    column, side = pl.program_id(1), pl.program_id(2)

    @pl.when((column == 0) & (side == 0))
    def _():
        parts[...] = jnp.zeros(parts.shape, parts.dtype)

    @pl.when(side == 0)
    def _():
        wide = [part[...].astype(jnp.float32) for part in (gate, up, dy)]
        y, back = jax.vjp(activation, *wide[:2])
        d_gate, d_up = back(wide[2] * scales[:, :1])
        dh[...], kept[...] = d_gate.astype(dh.dtype), d_up.astype(kept.dtype)
        products = y * wide[2]
        parts[...] += functools.reduce(
            jnp.add, [products[:, i : i + LANES] for i in range(0, products.shape[1], LANES)]
        )

    @pl.when(side == 1)
    def _():
        dh[...] = kept[...]
