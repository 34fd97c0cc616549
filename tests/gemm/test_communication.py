"""What travels in one GeMM, and in which order: read off lowered programs, so nothing is compiled."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from mstrain.gemm import LoweringOptions, Plan, grid_of, linear, meshslice
from mstrain.gemm.local import NN, NT, TN, all_gather, dot, piece, reduce_scatter
from tests.gemm.products import DIMS, mesh_of, place, random_operands, step
from tests.gemm.programs import (
    Operation,
    collectives,
    dependencies,
    flow,
    flow_of,
    flow_text,
    groups_of,
    operations,
    shard_bytes,
)
from tests.quick import QUICK

FLOWS = ("os", "ls", "rs")
# (kind, matrix, direction) of the two movements of a flow; MeshSlice paper, section 2.3.
MOVES = {
    "os": (("all_gather", "a", "cols"), ("all_gather", "b", "rows")),
    "ls": (("all_gather", "b", "rows"), ("reduce_scatter", "y", "cols")),
    "rs": (("all_gather", "a", "cols"), ("reduce_scatter", "y", "rows")),
}


def movements(name, grid):
    """{(kind, groups): analytic bytes sent by each device} of the two collectives of a flow."""
    shards = shard_bytes(name, grid)
    return {
        (kind, groups_of(grid.mesh, getattr(grid, way))): (grid.size(getattr(grid, way)) - 1) * shards[matrix]
        for kind, matrix, way in MOVES[name]
    }


def sent(ops):
    """{(kind, groups): (how many collectives, bytes sent by each device)}."""
    totals = collections.defaultdict(lambda: (0, 0))
    for op in ops:
        count, total = totals[op.kind, op.groups]
        totals[op.kind, op.groups] = (count + 1, total + op.sent)
    return dict(totals)


@pytest.mark.parametrize("mesh", ["2x4", "4x2"])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "twin"])
@pytest.mark.parametrize("name", FLOWS)
def test_meshslice_moves_what_collective_moves_in_s_parts(name, swapped, mesh):
    grid = grid_of("meshslice", mesh_of(mesh))
    grid = grid.swapped if swapped else grid
    for algorithm, slices in (("collective", 1), ("meshslice", 1), ("meshslice", 2), ("meshslice", 3)):
        ops = collectives(flow_of(algorithm, name, grid, slices))
        assert len(ops) == 2 * slices
        assert sent(ops) == {key: (slices, total) for key, total in movements(name, grid).items()}


def test_rings_move_what_reduce_scatters_move():
    grid = grid_of("meshslice", mesh_of("4x2"))
    ops = collectives(flow(functools.partial(meshslice.rs, lowering=LoweringOptions(rs_in_rings=True)), "rs", grid, 2))
    kinds = collections.Counter(op.kind for op in ops)
    assert kinds == {"all_gather": 2, "collective_permute": 2 * 2 * (grid.num_rows - 1)}
    (expected,) = [size for key, size in movements("rs", grid).items() if key[0] == "reduce_scatter"]
    assert sum(op.sent for op in ops if op.kind == "collective_permute") == expected


def test_one_row_or_column_needs_one_direction():
    for mesh, moving in (("1x4", "cols"), ("4x1", "rows")):
        grid = grid_of("meshslice", mesh_of(mesh))
        for name in FLOWS:
            expected = [kind for kind, _, way in MOVES[name] if way == moving] * 3
            assert [op.kind for op in collectives(flow_of("meshslice", name, grid, 3))] == expected


@pytest.mark.parametrize("name", FLOWS)
def test_wang_is_a_bidirectional_ring_and_one_collective(name):
    grid = grid_of("wang", mesh_of("2x4"))
    ops = collectives(flow_of("wang", name, grid))
    rings = [op for op in ops if op.kind == "collective_permute"]
    rest = [op for op in ops if op.kind != "collective_permute"]
    assert len(rings) == 2 * (grid.num_cols - 1)
    ways = collections.Counter(tuple(sorted({(to - at) % 4 for at, to in op.groups})) for op in rings)
    assert ways == {(1,): 3, (3,): 3}
    assert all(at // 4 == to // 4 for op in rings for at, to in op.groups)  # within a row of the mesh
    expected = movements(name, grid)
    (ring,) = [key for key in expected if key[1] == groups_of(grid.mesh, ("col",))]
    assert sum(op.sent for op in rings) == expected.pop(ring)
    assert sent(rest) == {key: (1, total) for key, total in expected.items()}


@pytest.mark.parametrize("name", FLOWS)
def test_cannon_only_permutes(name):
    grid, side = grid_of("cannon", mesh_of("4x4")), 4
    ops = collectives(flow_of("cannon", name, grid))
    assert {op.kind for op in ops} == {"collective_permute"}
    skews = 2  # of both operands, or of one operand and the result
    assert len(ops) == skews + 2 * (side - 1)
    for op in ops:
        at, to = zip(*op.groups)
        assert sorted(at) == sorted(to) == list(range(side**2))
    moving = [shard_bytes(name, grid)[matrix] for _, matrix, _ in MOVES[name]]
    assert sum(op.sent for op in ops) == side * sum(moving)


@pytest.mark.parametrize("name", FLOWS)
def test_summa_broadcasts_or_reduces_a_panel_per_step(name):
    grid, panels = grid_of("summa", mesh_of("2x4")), 4
    ops = collectives(flow_of("summa", name, grid))
    assert {op.kind for op in ops} == {"all_reduce"}
    shards = shard_bytes(name, grid)
    expected = collections.Counter()
    for _, matrix, way in MOVES[name]:
        panel = shards[matrix] * grid.size(getattr(grid, way)) // panels
        expected[groups_of(grid.mesh, getattr(grid, way)), panel] += panels
    assert collections.Counter((op.groups, op.in_bytes) for op in ops) == expected


def test_one_dimensional_baselines_use_one_collective():
    """Megatron gathers tokens into a block and scatters them out of it; FSDP gathers the weight."""
    mesh = mesh_of("2x4")
    megatron, fsdp = grid_of("megatron", mesh), grid_of("fsdp", mesh)
    every = groups_of(mesh, ("row", "col"))
    into, out = (collectives(flow_of("megatron", "rs", grid)) for grid in (megatron, megatron.swapped))
    shards = shard_bytes("rs", megatron)
    assert sent(into) == {("all_gather", every): (1, 7 * shards["a"])}
    assert sent(out) == {("reduce_scatter", every): (1, 7 * shards["y"])}
    weight = shard_bytes("os", fsdp)["b"]
    assert sent(collectives(flow_of("fsdp", "os", fsdp))) == {("all_gather", every): (1, 7 * weight)}


def moved_in_a_step(plan: Plan) -> list[Operation]:
    """Collectives of the forward and backward pass of one product."""
    T, I, O = DIMS
    w_shape = (O, I) if plan.dataflow == "ls" else (I, O)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((T, I), w_shape, (T, O))]
    return collectives(operations(jax.jit(lambda *a: step(plan, *a)).lower(*shapes).as_text()))


@pytest.mark.parametrize("dataflow", FLOWS)
def test_a_training_step_is_three_products_and_one_sum_over_data(dataflow):
    """y, dx and dw of one layer: 6 S partial collectives, and the weight gradient's sum over `data`."""
    plan = Plan("meshslice", dataflow, grid_of("meshslice", mesh_of("2x2x2")), 3)
    ops, (_, I, O) = moved_in_a_step(plan), DIMS
    kinds = collections.Counter(op.kind for op in ops)
    assert kinds == {"all_gather": 4 * 3, "reduce_scatter": 2 * 3, "all_reduce": 1}
    (reduction,) = [op for op in ops if op.kind == "all_reduce"]
    assert reduction.groups == groups_of(plan.grid.mesh, ("data",))
    assert reduction.in_bytes == 4 * I * O // 4


def traffic(plan: Plan) -> list[tuple]:
    """Of `moved_in_a_step`, whatever the order; collectives of one device are left out."""
    ops = [op for op in moved_in_a_step(plan) if len(min(op.groups)) > 1]
    return sorted((op.kind, sorted(op.groups), op.in_bytes, op.out_bytes) for op in ops)


@pytest.mark.parametrize("algorithm", ["meshslice", "collective"])
@pytest.mark.parametrize("dataflow", FLOWS)
@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
def test_a_product_called_fsdp_s_program_moves_what_fsdp_moves(algorithm, dataflow, mesh):
    plan = Plan(algorithm, dataflow, grid_of(algorithm, mesh_of(mesh)))
    fsdp = Plan("fsdp", "os", grid_of("fsdp", mesh_of(mesh)))
    assert (plan.program == fsdp.program) == (traffic(plan) == traffic(fsdp))
    assert (plan.program == "fsdp") == (mesh == "8x1" and dataflow != "rs")


def test_meshslice_in_one_slice_is_called_collective_s_program():
    grid = grid_of("meshslice", mesh_of("4x2"))
    assert [Plan("meshslice", "os", grid, slices).program for slices in (1, 2)] == ["collective", "meshslice"]


@pytest.mark.parametrize("dataflow", FLOWS)
def test_compiled_weight_gradient_keeps_its_collectives(dataflow):
    plan = Plan("meshslice", dataflow, grid_of("meshslice", mesh_of("2x4")), 2)
    inputs = place(plan, random_operands((24, 16, 32)))

    def weight_gradient(x, w, dy):
        return jax.vjp(lambda w: linear(x, w, plan), w)[1](dy)

    text = jax.jit(weight_gradient).lower(*inputs).compile(compiler_options=QUICK).as_text()
    scatters = 0 if dataflow == "rs" else 2  # dw = RS(x, dy) or, W-stationary, OS(x.T, dy)
    assert (text.count(" all-gather("), text.count(" reduce-scatter(")) == (4 - scatters, scatters)
    assert text.count(" all-reduce(") + text.count(" all-to-all(") + text.count(" collective-permute(") == 0


def check_pipelined(ops, slices):
    """Asserts that slice s + 1 is fetched and slice s - 1 sent off before the product of slice s."""
    position = {op.result: i for i, op in enumerate(ops)}
    dots = [op for op in ops if op.kind == "dot_general"]
    assert len(dots) == slices
    for s, product in enumerate(dots):
        if s + 1 < slices:
            fetches = [x for x in dots[s + 1].operands if x in position]
            assert fetches, "every product uses something gathered"
            assert all(position[x] < position[product.result] for x in fetches), f"slice {s + 1} is fetched late"
        if s + 2 < slices:
            early = [x for x in dots[s + 2].operands if x in position]
            assert all(position[x] > position[product.result] for x in early), f"slice {s + 2} is fetched early"
        sends = [op for op in ops if s and op.kind == "reduce_scatter" and op.operands[0] == dots[s - 1].result]
        assert all(position[op.result] < position[product.result] for op in sends), f"slice {s - 1} is sent late"


@pytest.mark.parametrize("lowering", [LoweringOptions(), LoweringOptions(matrix_unit=10**6)])
@pytest.mark.parametrize("name", FLOWS)
def test_meshslice_issues_the_neighboring_slices_first(name, lowering):
    function = functools.partial(getattr(meshslice, name), lowering=lowering)
    ops = flow(function, name, grid_of("meshslice", mesh_of("2x4")), 4)
    check_pipelined(ops, 4)
    scattered = {op.operands[0] for op in ops if op.kind == "reduce_scatter"}
    dots = {op.result for op in ops if op.kind == "dot_general"}
    assert scattered == (set() if name == "os" else dots)


def test_output_stationary_gathers_wait_for_the_product_two_steps_back():
    """Issue order binds no compiler; a barrier does, and bounds the memory to two gathered slices."""
    slices = 4
    text = flow_text(meshslice.os, "os", grid_of("meshslice", mesh_of("2x4")), slices)
    needs = dependencies(text)
    dots = [op for op in operations(text) if op.kind == "dot_general"]
    for s, product in enumerate(dots):
        for fetched in product.operands:
            assert [dot.result in needs[fetched] for dot in dots] == [t <= s - 2 for t in range(slices)]


@pytest.mark.parametrize("name", ["ls", "rs"])
def test_a_scatter_waits_for_the_one_before(name):
    text = flow_text(getattr(meshslice, name), name, grid_of("meshslice", mesh_of("2x4")), 4)
    needs = dependencies(text)
    scatters = [op.result for op in operations(text) if op.kind == "reduce_scatter"]
    assert len(scatters) == 4
    for s, scatter_s in enumerate(scatters):
        assert [other in needs[scatter_s] for other in scatters] == [t < s for t in range(4)]


def serial_os(a, b, rows, cols, slices):
    pairs = [(piece(a, 1, s, slices), piece(b, 0, s, slices)) for s in range(slices)]
    return sum(dot(all_gather(a_s, cols, 1), all_gather(b_s, rows, 0), NN) for a_s, b_s in pairs)


def serial_ls(a, b, rows, cols, slices):
    parts = [reduce_scatter(dot(a, all_gather(piece(b, 0, s, slices), rows, 0), NT), cols, 1) for s in range(slices)]
    return jnp.concatenate(parts, 1)


def serial_rs(a, b, rows, cols, slices):
    parts = [reduce_scatter(dot(all_gather(piece(a, 1, s, slices), cols, 1), b, TN), rows, 0) for s in range(slices)]
    return jnp.concatenate(parts, 0)


def late_send_ls(a, b, rows, cols, slices):
    fetched = [all_gather(piece(b, 0, s, slices), rows, 0) for s in range(slices)]
    products = [dot(a, b_s, NT) for b_s in fetched]
    return jnp.concatenate([reduce_scatter(y, cols, 1) for y in products], 1)


@pytest.mark.parametrize("function", [serial_os, serial_ls, serial_rs, late_send_ls])
def test_order_check_notices_serial_and_late_programs(function):
    ops = flow(function, function.__name__[-2:], grid_of("meshslice", mesh_of("2x4")), 4)
    with pytest.raises(AssertionError, match="late|early"):
        check_pipelined(ops, 4)


def test_groups_are_numbered_as_the_mesh():
    mesh = mesh_of("2x2x4")
    assert groups_of(mesh, ("col",)) == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)}
    assert (0, 4) in groups_of(mesh, ("row",)) and (3, 11) in groups_of(mesh, ("data",))
