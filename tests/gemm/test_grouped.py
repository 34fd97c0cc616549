"""Grouped products equal a loop over experts: every algorithm and dataflow, gradients, any distribution of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mstrain.gemm import ALGORITHMS, Plan, linear, ragged
from mstrain.gemm.grouping import group_choices, rows_into
from tests.gemm.products import check, mesh_of, storage_of
from tests.quick import QUICK

T, K, E, D, F = 48, 2, 4, 48, 96
ROUTINGS = {
    "random": lambda draw: np.argsort(draw.random((T, E)), axis=1)[:, :K],
    "empty": lambda draw: np.argsort(draw.random((T, 2)), axis=1)[:, :K] * 3,  # experts 1 and 2 have no token
    "one": lambda draw: np.tile([2, 1], (T, 1)),  # all tokens choose the same experts
}


@functools.cache
def operands(routing: str):
    """x, the two weights, dy, and the choices of all tokens."""
    draw = np.random.default_rng(0)
    shapes = ((T, D), (E, D, F), (E, F, D), (T, D))
    arrays = [draw.standard_normal(shape, np.float32) for shape in shapes]
    return *arrays, ROUTINGS[routing](draw).astype(np.int32)


@functools.cache
def reference(routing: str):
    """(y, dx, gradients of both weights) of y = sum over a token's experts of tanh(x U) V, by a loop over experts."""
    x, up, down, dy, choices = operands(routing)

    def forward(x, up, down):
        y = jnp.zeros((T, D))
        for e in range(E):
            chosen = jnp.sum(choices == e, axis=1)[:, None]
            y = y + chosen * (jnp.tanh(x @ up[e]) @ down[e])
        return y

    y, pullback = jax.vjp(forward, x, up, down)
    return y, *pullback(dy)


def pairs_of(algorithm: str, mesh, slices: int) -> list[tuple[Plan, Plan]]:
    """Plans of both products, for every dataflow that grouped products have."""
    kind = ALGORITHMS[algorithm]
    grid = kind.grid(mesh)
    counts = slices if kind.sliced else 1
    found = []
    for flow in kind.grouped:
        if flow == "rs":
            found.append((Plan(algorithm, "rs", grid), Plan(algorithm, "rs", grid.swapped)))
        else:
            found += [(Plan(algorithm, flow, grid, counts), Plan(algorithm, flow, grid, counts))]
    if kind.sliced:
        found.append((Plan(algorithm, "os", grid, counts), Plan(algorithm, "ls", grid)))
    return found


def step(pair, x, up, down, dy, choices):
    into, out = pair
    rows = rows_into(into, K)
    groups = group_choices(choices, E, into)

    def forward(x, up, down):
        h = linear(x, up, into, groups=groups, rows=rows)
        return linear(jnp.tanh(h), down, out, groups=groups, rows=rows.reversed)

    y, pullback = jax.vjp(forward, x, up, down)
    return y, *pullback(dy)


def stored(plan, w):
    return dataclasses.replace(storage_of(plan, w.shape), shape=w.shape).from_canonical(w)


def place(pair, arrays):
    into, out = pair
    x, up, down, dy, choices = arrays
    specs = (into.input_layout.spec, into.grid.spec_of(up.shape), out.grid.spec_of(down.shape),
             out.output_layout.spec, P(into.input_layout.tokens))  # fmt: skip
    arrays = (x, stored(into, up), stored(out, down), dy, choices)
    return tuple(jax.device_put(a, into.grid.sharding(s)) for a, s in zip(arrays, specs, strict=True))


CASES = [("2x4", "meshslice", 2), ("2x4", "megatron", 1), ("4x2", "wang", 1), ("8x1", "fsdp", 1)]
CASES += [("2x2x2", "cannon", 1), ("2x2x2", "gspmd", 1)]


@pytest.mark.parametrize("mesh, algorithm, slices", CASES)
def test_value_and_gradients_equal_a_loop_over_experts(mesh, algorithm, slices):
    pairs = pairs_of(algorithm, mesh_of(mesh), slices)
    program = jax.jit(lambda inputs: [step(pair, *arrays) for pair, arrays in zip(pairs, inputs, strict=True)])
    compiled = None
    for routing in ROUTINGS:
        inputs = [place(pair, operands(routing)) for pair in pairs]
        compiled = compiled or program.lower(inputs).compile(compiler_options=QUICK)
        for pair, (y, dx, *dws) in zip(pairs, compiled(inputs), strict=True):
            right, d_right, *weights = reference(routing)
            what = f"{routing} {algorithm} {pair[0].dataflow},{pair[1].dataflow}"
            for dw, weight, plan in zip(dws, weights, pair, strict=True):
                check((y, dx, dw), (right, d_right, stored(plan, weight)), what)


@pytest.mark.parametrize("sizes", [(20, 0, 25, 3), (0, 0, 48, 0), (1, 1, 1, 1), (0, 0, 0, 0)])
def test_what_replaces_ragged_dot_computes_the_same(sizes):
    """On CPUs and TPUs; `sizes` may leave rows to no group."""
    x, up, down, dy, _ = operands("random")
    sizes, used = jnp.array(sizes, jnp.int32), sum(sizes)
    for transposed, w in ((False, up), (True, down)):
        expected = ragged.multiply(x, w, sizes, transposed, "gpu")
        by_kernel = ragged.multiply_by_kernel(x, w, sizes, transposed, interpret=True)
        for found in (ragged.multiply_in_blocks(x, w, sizes, transposed), by_kernel):
            np.testing.assert_allclose(found[:used], expected[:used], rtol=1e-5, atol=1e-5)
    expected = ragged.sum_products(x, dy, sizes, "gpu")
    for found in (ragged.sum_in_blocks(x, dy, sizes), ragged.sum_by_kernel(x, dy, sizes, interpret=True)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
