"""Value and gradients of every algorithm equal the dense product; a wrong result would be noticed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.interpreters.mlir import ir

from mstrain.gemm import ALGORITHMS, LoweringOptions, Plan, grid_of
from mstrain.gemm.scheduling import SchedulingGroups
from tests.gemm.products import (
    DIMS,
    check,
    dense,
    expected,
    mesh_of,
    place,
    plans_of,
    random_operands,
    run,
    step,
)

# Slice counts legal on each mesh for tokens, features in and features out alike.
SLICES = {
    "1x4": (2,),
    "4x1": (3,),
    "2x4": (1, 3),
    "4x2": (6,),
    "3x2": (5,),
    "4x4": (2,),
    "2x8": (3,),
    "2x2x2": (3,),
}
TWINS = ("2x4", "3x2", "2x2x2")
ONE_MESH_IS_ENOUGH = {name for name, algorithm in ALGORITHMS.items() if algorithm.only_dataflow}


def cases():
    for mesh in SLICES:
        for algorithm in ALGORITHMS:
            square = mesh in ("4x4", "2x2x2")
            if algorithm in ONE_MESH_IS_ENOUGH and mesh not in ("2x4", "2x2x2"):
                continue
            if algorithm != "cannon" or square:
                yield algorithm, mesh


@pytest.mark.parametrize("algorithm, mesh", list(cases()))
def test_value_and_gradients_equal_the_dense_product(algorithm, mesh):
    plans = plans_of(algorithm, mesh_of(mesh), SLICES[mesh], twins=mesh in TWINS)
    if algorithm in ONE_MESH_IS_ENOUGH - {"megatron"}:
        plans = plans[:1]
    for plan in plans:
        plan.check(*DIMS[1:], DIMS[0] // plan.grid.mesh.shape["data"], "the product")
    inputs = [place(plan, random_operands()) for plan in plans]
    for plan, results in zip(plans, run(plans, inputs), strict=True):
        what = f"{algorithm} {plan.dataflow} rows={plan.grid.rows} cols={plan.grid.cols} S={plan.slices}"
        check(results, expected(plan, dense()), what)
        check_layouts(plan, results)


@pytest.mark.parametrize("mesh", ["1x4", "2x4", "3x2"])
def test_another_form_gives_the_same(mesh):
    every = LoweringOptions(rs_in_rings=True, matrix_unit=10**6, row_major=True, opaque_slices=True)
    forms = LoweringOptions(), LoweringOptions(row_major=True), every
    plans = plans_of("meshslice", mesh_of(mesh), SLICES[mesh][-1:])
    plans = [dataclasses.replace(plan, lowering=lowering) for plan in plans for lowering in forms]
    inputs = [place(plan, random_operands()) for plan in plans]
    programs = {jax.jit(functools.partial(step, plan)).lower(*arrays).as_text() for plan, arrays in zip(plans, inputs)}
    assert len(programs) == len(plans)  # no option is without effect
    for plan, results in zip(plans[1::3] + plans[2::3], run(plans[1::3] + plans[2::3], inputs[1::3] + inputs[2::3])):
        check(results, expected(plan, dense()), f"{plan.dataflow} as {plan.lowering}")


@pytest.mark.parametrize("dataflow", ["os", "ls"])
def test_opaque_slices_of_a_float32_weight_are_rounded_as_plain_ones(dataflow):
    plan = Plan("meshslice", dataflow, grid_of("meshslice", mesh_of("2x4")), 3)
    other = dataclasses.replace(plan, lowering=LoweringOptions(opaque_slices=True))
    x, w, dy = place(plan, random_operands())
    inputs = [(x.astype("bfloat16"), w, dy.astype("bfloat16"))] * 2
    plain, opaque = run([plan, other], inputs)
    for a, b in zip(plain, opaque, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


SUM = ["add", "reduce_scatter"]  # and the sum of two elements
BOTH = ["all_gather", "dot_general"]
GROUPS = {  # algorithm, dataflow, slices: groups, and the operations that are in groups 7 and 8
    ("meshslice", "os", 3): (SchedulingGroups(last_sum=7), SUM, []),
    ("meshslice", "ls", 3): (SchedulingGroups((None, 7, 8), products=(7, None, 8)), BOTH, BOTH),
    ("meshslice", "os", 1): (SchedulingGroups(last_sum=7, products=(8,)), SUM, ["dot_general"]),
    ("collective", "ls", 1): (SchedulingGroups((7,), products=(8,)), ["all_gather"], ["dot_general"]),
}


@pytest.mark.parametrize("how", GROUPS)
def test_scheduling_groups_have_the_members_named_and_change_no_result(how):
    scheduling, *members = GROUPS[how]
    algorithm, dataflow, slices = how
    plan = Plan(algorithm, dataflow, grid_of(algorithm, mesh_of("2x4")), slices, scheduling=scheduling)
    arrays = place(plan, random_operands())
    lowered = jax.jit(functools.partial(step, plan)).lower(*arrays).compiler_ir("stablehlo")
    assert [operations_in(lowered, group) for group in (7, 8)] == members
    check(run([plan], [arrays])[0], expected(plan, dense()), f"{how} in scheduling groups")


def operations_in(module, group: int) -> list[str]:
    """Sorted names of the operations in a scheduling group of a lowered program."""
    found = []

    def visit(operation):
        if f'_scheduling_group_id = "{group}"' in str(operation.attributes.get("mhlo.frontend_attributes", "")):
            found.append(operation.name.removeprefix("stablehlo."))
        return ir.WalkResult.ADVANCE

    module.operation.walk(lambda operation: visit(operation.operation))
    return sorted(found)


def check_layouts(plan: Plan, results):
    """Outputs are sharded as the layouts say, gradients as their operands."""
    specs = (plan.output_layout.spec, plan.input_layout.spec, plan.grid.weight_spec)
    specs = specs[:1] if plan.algorithm == "gspmd" else specs  # the compiler places its gradients
    for result, spec in zip(results, specs):
        assert result.sharding.is_equivalent_to(plan.grid.sharding(spec), 2), (
            plan.algorithm,
            plan.dataflow,
            spec,
        )


def test_a_single_device_multiplies_alone():
    plans = [plan for algorithm in ALGORITHMS for plan in plans_of(algorithm, mesh_of("1x1"))]
    inputs = [place(plan, random_operands((12, 6, 18))) for plan in plans]
    for plan, results in zip(plans, run(plans, inputs), strict=True):
        check(results, expected(plan, dense((12, 6, 18))), f"{plan.algorithm} {plan.dataflow}")


def test_single_columns_can_still_circulate():
    """Wang halves every block; a block of one column leaves one half empty."""
    dims = (16, 8, 8)
    plans = plans_of("wang", mesh_of("2x8"))
    inputs = [place(plan, random_operands(dims)) for plan in plans]
    for plan, results in zip(plans, run(plans, inputs), strict=True):
        check(results, expected(plan, dense(dims)), plan.dataflow)


SQUARE = (48, 48, 48)  # so that a transposed result has the right shape


@pytest.fixture(scope="module")
def square_results():
    plans = [Plan("meshslice", flow, grid_of("meshslice", mesh_of("2x4")), 3) for flow in ("os", "ls", "rs")]
    inputs = [place(plan, random_operands(SQUARE)) for plan in plans]
    return list(zip(plans, inputs, run(plans, inputs), strict=True))


@pytest.mark.parametrize("index", range(3), ids=("y", "dx", "dw"))
@pytest.mark.parametrize(
    "mutate",
    (np.zeros_like, lambda r: 2 * r, np.transpose, lambda r: np.full_like(r, np.nan)),
    ids=("zeros", "doubled", "transposed", "nan"),
)
def test_checker_notices_wrong_results(square_results, mutate, index):
    for plan, _, results in square_results:
        right = expected(plan, dense(SQUARE))
        check(results, right)
        wrong = [np.asarray(result) for result in results]
        wrong[index] = mutate(wrong[index])
        with pytest.raises(AssertionError):
            check(wrong, right)


def test_checker_notices_swapped_slices(square_results):
    """Slices 0 and 1 of the sliced operand change places in every shard, for real."""
    plans, wrong_inputs = [], []
    for plan, (x, w, dy), _ in square_results:
        if plan.dataflow == "rs":  # tokens are sliced
            x = jax.device_put(swap_slices(np.asarray(x), plan.grid.num_cols, plan.slices), x.sharding)
        else:
            w = jax.device_put(swap_slices(np.asarray(w), plan.grid.num_rows, plan.slices), w.sharding)
        plans.append(plan)
        wrong_inputs.append((x, w, dy))
    for plan, results in zip(plans, run(plans, wrong_inputs), strict=True):
        with pytest.raises(AssertionError):
            check(results, expected(plan, dense(SQUARE)))


def swap_slices(x, shards, slices):
    x = x.reshape(shards, slices, -1, x.shape[-1])
    return x[:, [1, 0, *range(2, slices)]].reshape(shards * slices * x.shape[2], -1)
