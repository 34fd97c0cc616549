"""Products under test beside their dense references, and the one checker that all of them go through.

T tokens, I features in, O features out: all different, rich in divisors so that odd slice counts are legal.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from mstrain.gemm import Plan, Storage, find_algorithm, grid_of, linear
from mstrain.mesh import make_mesh, parse_mesh
from tests.quick import QUICK

DIMS = (240, 120, 360)


@functools.cache
def mesh_of(text: str) -> Mesh:
    return make_mesh(parse_mesh(text))


@dataclasses.dataclass(frozen=True)
class Operands:
    """x_TxI, w_IxO and the cotangent dy_TxO in canonical order."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array


@functools.cache
def random_operands(dims=DIMS, dtype="float32") -> Operands:
    T, I, O = dims
    rng = np.random.default_rng(0)
    return Operands(*(rng.standard_normal(shape, np.float32).astype(dtype) for shape in ((T, I), (I, O), (T, O))))


@functools.cache
def dense(dims=DIMS):
    """(y, dx, dw) of y = x @ w by JAX's own differentiation."""
    operands = random_operands(dims)
    y, backward = jax.vjp(lambda x, w: x @ w, operands.x, operands.w)
    return y, *backward(operands.dy)


def plans_of(algorithm: str, mesh: Mesh, slices=(1,), twins=False) -> list[Plan]:
    """Every dataflow (and, with `twins`, its transposed twin) that `algorithm` has on `mesh`."""
    grid = grid_of(algorithm, mesh)
    grids = (grid, grid.swapped) if twins or algorithm == "megatron" else (grid,)
    flows = find_algorithm(algorithm).dataflows
    counts = slices if find_algorithm(algorithm).sliced else (1,)
    return [Plan(algorithm, flow, grid, count) for flow in flows for grid in grids for count in counts]


def storage_of(plan: Plan, shape) -> Storage:
    """How the weight of `plan` is stored."""
    return Storage(
        shape,
        columns=plan.grid.num_cols,
        rows=plan.grid.num_rows,
        slices=1 if plan.dataflow == "rs" else plan.slices,
        transposed=plan.dataflow == "ls",
    )


def output_order(plan: Plan, y_TxO):
    """Outputs of `rs` hold their tokens slice-major over the rows, inputs in order over the columns."""
    if plan.dataflow != "rs":
        return y_TxO
    copies, width = plan.grid.mesh.shape["data"], y_TxO.shape[-1]
    rule = Storage(
        (len(y_TxO) // copies, width), columns=plan.grid.num_cols, rows=plan.grid.num_rows, slices=plan.slices
    )
    return rule.from_canonical(y_TxO.reshape(copies, -1, width)).reshape(y_TxO.shape)


def expected(plan: Plan, reference):
    """The dense (y, dx, dw) in the orders in which `plan` returns them."""
    y, dx, dw = reference
    return output_order(plan, y), dx, storage_of(plan, dw.shape).from_canonical(dw)


def place(plan: Plan, operands: Operands):
    """(x, w, dy) in stored order where `plan` wants them."""
    arrays = (
        operands.x,
        storage_of(plan, operands.w.shape).from_canonical(operands.w),
        output_order(plan, operands.dy),
    )
    specs = (plan.input_layout.spec, plan.grid.weight_spec, plan.output_layout.spec)
    return tuple(jax.device_put(a, plan.grid.sharding(s)) for a, s in zip(arrays, specs, strict=True))


def step(plan: Plan, x, w, dy):
    """(y, dx, dw) under `plan`."""
    y, backward = jax.vjp(lambda x, w: linear(x, w, plan), x, w)
    return y, *backward(dy)


def run(plans: list[Plan], inputs):
    """(y, dx, dw) of every plan, compiled as one program; `inputs` holds (x, w, dy) of each."""

    def program(inputs):
        return [step(plan, *arrays) for plan, arrays in zip(plans, inputs, strict=True)]

    return jax.jit(program).lower(inputs).compile(compiler_options=QUICK)(inputs)


def error(result, reference) -> float:
    """Largest deviation relative to the largest reference."""
    result, reference = np.asarray(result, np.float64), np.asarray(reference, np.float64)
    assert result.shape == reference.shape
    return np.max(np.abs(result - reference)) / np.max(np.abs(reference))


def check(results, references, what="", tolerance=1e-5):
    """Asserts that y, dx and dw agree with their references (NaN agrees with nothing)."""
    for name, result, reference in zip(("y", "dx", "dw"), results, references, strict=True):
        off = error(result, reference)
        assert off <= tolerance, f"{what}: {name} is off by {off:.1e} of its largest entry"
