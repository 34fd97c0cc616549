"""Illegal plans are refused with the nearest legal choice; what is called legal is legal."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.gemm import ALGORITHMS, DATAFLOWS, Plan, PlanPair, find_algorithm, grid_of, legal_slices, linear
from tests.gemm.products import mesh_of, plans_of, step


def plan_on(mesh, algorithm="meshslice", dataflow="os", slices=1):
    return Plan(algorithm, dataflow, grid_of(algorithm, mesh_of(mesh)), slices)


@pytest.mark.parametrize(
    "name, meant",
    [("meshslise", "meshslice"), ("Cannon", "cannon"), ("mega", "megatron"), ("sumna", "summa")],
)
def test_unknown_algorithm_is_told_the_nearest_one(name, meant):
    with pytest.raises(ValueError, match=f"Did you mean {meant}"):
        find_algorithm(name)


def test_unknown_algorithm_is_told_all_of_them():
    with pytest.raises(ValueError) as refused:
        grid_of("zzz", mesh_of("2x4"))
    assert all(name in str(refused.value) for name in ALGORITHMS)
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize("mesh", ["2x4", "3x2"])
def test_cannon_needs_a_square_mesh(mesh):
    with pytest.raises(ValueError, match=f"square mesh and this one is {mesh}.*mesh=2x2"):
        plan_on(mesh, "cannon").check(48, 48, 48, "the product")
    plan_on("2x2", "cannon").check(48, 48, 48, "the product")


@pytest.mark.parametrize(
    "dataflow, in_dim, out_dim, name, unit",
    [
        ("os", 42, 48, "input", 4),  # gathered over 2 rows as a weight and 4 columns as activations
        ("os", 48, 42, "output", 4),
        ("ls", 48, 42, "output", 4),
        ("rs", 45, 48, "input", 2),
        ("rs", 48, 42, "output", 4),
    ],
)
def test_indivisible_dims_name_the_multiple_they_need(dataflow, in_dim, out_dim, name, unit):
    with pytest.raises(ValueError, match=f"qkv.* {name} features .* multiple of {unit}"):
        plan_on("2x4", dataflow=dataflow).check(in_dim, out_dim, 48, "qkv")


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("slices, near", [(5, "4 or 6"), (7, "6 or 8"), (1000, "8 or 12 or 24")])
def test_illegal_slice_count_names_the_nearest_legal_ones(dataflow, slices, near):
    with pytest.raises(ValueError) as refused:
        plan_on("2x4", dataflow=dataflow, slices=slices).check(96, 96, 96, "mlp in")
    message = str(refused.value)
    assert "mlp in" in message and f"slice count {slices}" in message
    proposed = list(map(int, re.findall(r"\d+", message.split("parallel.slices=")[1])))
    assert set(map(int, re.findall(r"\d+", near))) <= set(proposed)
    for better in proposed:
        plan_on("2x4", dataflow=dataflow, slices=better).check(96, 96, 96, "mlp in")


BATCH, LARGE = 288, 1440  # divide over every mesh below, with every slice count


def accepts(plan, in_dim, out_dim):
    try:
        plan.check(in_dim, out_dim, BATCH, "the product")
    except ValueError:
        return False
    return True


def needed_dims(plan):
    """What a product needs and no more: whole shards, and whole slices of the dim both directions share."""
    rows, cols = plan.grid.num_rows, plan.grid.num_cols
    shared = math.lcm(rows, cols) * plan.slices
    return {"os": (shared, cols), "ls": (cols, shared), "rs": (rows, cols)}[plan.dataflow]


def smallest_dims(plan):
    """The fewest features in, and then the fewest out, that `plan` accepts; None if it accepts none."""
    in_dim = next((n for n in range(1, LARGE) if accepts(plan, n, LARGE)), None)
    return in_dim and (in_dim, next(n for n in range(1, LARGE) if accepts(plan, in_dim, n)))


@pytest.mark.parametrize("mesh", ["4x1", "2x4", "3x2", "2x2x2"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_check_accepts_can_be_multiplied(algorithm, mesh):
    """Down to single columns; shapes only, nothing is compiled."""
    mesh = mesh_of(mesh)
    for plan in plans_of(algorithm, mesh, slices=(1, 2, 3, 4), twins=algorithm == "meshslice"):
        dims = smallest_dims(plan)
        assert (dims is None) == (algorithm == "cannon" and mesh.shape["row"] != mesh.shape["col"])
        if dims is None:
            continue
        (in_dim, out_dim), tokens = dims, BATCH * mesh.shape["data"]
        assert dims == needed_dims(plan)
        w_shape = (out_dim, in_dim) if plan.dataflow == "ls" else (in_dim, out_dim)
        shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((tokens, in_dim), w_shape, (tokens, out_dim))]
        results = jax.eval_shape(functools.partial(step, plan), *shapes)
        assert [r.shape for r in results] == [(tokens, out_dim), (tokens, in_dim), w_shape]


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_legal_slices_are_those_that_divide_the_sliced_dim_on_both_directions(dataflow):
    for rows, cols, sliced in itertools.product(range(1, 7), range(1, 7), range(1, 150)):
        dims = {"os": (sliced, 7, 7), "ls": (7, sliced, 7), "rs": (7, 7, sliced)}[dataflow]
        divides = [s for s in range(2, sliced + 1) if sliced % (rows * s) == 0 and sliced % (cols * s) == 0]
        assert legal_slices(dataflow, *dims, rows, cols) == [1, *(s for s in divides if s <= 128)]


def test_tokens_inside_a_half_are_in_the_order_that_its_plan_states():
    plan = plan_on("2x4", dataflow="rs", slices=2)
    pair = PlanPair(plan, dataclasses.replace(plan, grid=plan.grid.swapped))
    numbers = jnp.arange(16)
    y_TxO = jax.jit(lambda x, w: linear(x, w, plan))(jnp.tile(numbers[:, None], 8).astype(jnp.float32), jnp.eye(8))
    np.testing.assert_array_equal(y_TxO[:, 0], pair.inside_order(numbers))
    assert pair.inside_order(numbers).tolist() != numbers.tolist()
