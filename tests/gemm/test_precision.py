"""Rounding: S = 1 is Collective to the bit, and slicing costs no accuracy in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.gemm import Plan, grid_of, linear
from tests.gemm.products import (
    error,
    mesh_of,
    output_order,
    place,
    plans_of,
    random_operands,
    run,
    step,
)
from tests.gemm.programs import operations
from tests.quick import QUICK

LONG = (128, 8192, 128)  # a long contraction: partial sums are many and large
SLICES = (1, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_slice_is_collective_to_the_bit(dtype):
    operands = random_operands((24, 16, 32), dtype)
    one_slice = plans_of("meshslice", mesh_of("2x4"))
    whole = [dataclasses.replace(plan, algorithm="collective") for plan in one_slice]
    inputs = [place(plan, operands) for plan in one_slice]
    for results, references in zip(run(one_slice, inputs), run(whole, inputs), strict=True):
        for result, reference in zip(results, references, strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(np.asarray(result), np.asarray(reference))


def test_master_weights_keep_their_dtype():
    """bfloat16 activations, float32 weights: they are communicated in bfloat16, their gradients summed in float32."""
    plan = Plan("meshslice", "os", grid_of("meshslice", mesh_of("2x2x2")), 2)
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((24, 16), "bfloat16"), ((16, 32), "float32"), ((24, 32), "bfloat16"))
    )
    lowered = jax.jit(lambda *arrays: step(plan, *arrays)).lower(x, w, dy)
    assert [out.dtype for out in lowered.out_info] == ["bfloat16", "bfloat16", "float32"]
    ops = operations(lowered.as_text())
    (reduction,) = [op for op in ops if op.kind == "all_reduce"]
    assert reduction.in_bytes == 4 * 16 * 32 // 4
    x_slice, w_slice = 2 * 6 * 4, 2 * 4 * 16
    assert {op.in_bytes for op in ops if op.kind == "all_gather"} == {x_slice, w_slice}


@pytest.fixture(scope="module")
def exact():
    operands = random_operands(LONG, "bfloat16")
    return np.asarray(operands.x, np.float64) @ np.asarray(operands.w, np.float64)


def test_output_stationary_error_does_not_grow_with_slices(exact):
    """The slices are summed in float32, so what remains is the final rounding to bfloat16."""
    grid = grid_of("meshslice", mesh_of("2x2"))
    plans = [Plan("meshslice", "os", grid, slices) for slices in SLICES]
    x, w, _ = place(plans[0], random_operands(LONG, "bfloat16"))
    program = jax.jit(lambda x, w: [linear(x, w, plan) for plan in plans])  # R = C: one order for every S
    errors = [error(y, exact) for y in program.lower(x, w).compile(compiler_options=QUICK)(x, w)]
    assert max(errors) <= 3e-3
    assert max(errors) <= 1.05 * min(errors)


def test_carrying_the_sum_in_bfloat16_would_show(exact):
    """The control: the same data, slices summed as the products are, in bfloat16."""
    operands = random_operands(LONG, "bfloat16")

    def carried(slices):
        total = jnp.zeros((), jnp.bfloat16)
        for x, w in zip(np.split(operands.x, slices, 1), np.split(operands.w, slices, 0), strict=True):
            total = total + (x.astype(np.float32) @ w.astype(np.float32)).astype(jnp.bfloat16)
        return error(total, exact)

    assert carried(1) <= 3e-3
    assert carried(64) >= 1e-2


@pytest.mark.parametrize("flow", ["ls", "rs"])
def test_scattered_outputs_do_not_depend_on_slices(flow):
    """These flows slice an output dim: no sum is cut, every entry is rounded as often as with Collective."""
    dims = (64, 256, 64)
    operands = random_operands(dims, "bfloat16")
    exact = np.asarray(operands.x, np.float64) @ np.asarray(operands.w, np.float64)
    plans = [Plan("meshslice", flow, grid_of("meshslice", mesh_of("2x4")), slices) for slices in (1, 4)]
    results = run(plans, [place(plan, operands) for plan in plans])
    errors = [error(y, output_order(plan, exact)) for plan, (y, _, _) in zip(plans, results, strict=True)]
    assert max(errors) <= 1.05 * min(errors) <= 1e-2
