"""`y = x @ w` for ordinary arrays: any leading dims, weights [in, out] in canonical order, sizes that do not divide."""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from mstrain.gemm.copies import COPIES
from mstrain.gemm.linear import linear
from mstrain.gemm.padding import Span
from mstrain.gemm.plan import Plan, grid_of, legal_slices
from mstrain.gemm.storage import Storage
from mstrain.mesh import AXES, make_mesh, parse_mesh

DATAFLOWS = ("os", "ls")  # rs exchanges the mesh axes of tokens and features, which pairs of products undo


def multiply(
    x: jax.Array,
    w: jax.Array,
    mesh: Mesh | str,
    algorithm: str = "meshslice",
    dataflow: str = "os",
    slices: int | None = None,
) -> jax.Array:
    """Multiplies by an algorithm of tensor parallelism; differentiable, inside `jax.jit` or outside.

    Args:
      x: [..., in]; its dtype is that of the product.
      w: [in, out] in canonical order, any float dtype.
      mesh: a mesh with axes `row` and `col`, and `data` or `replica` in front of them, or `mesh=` as text ("2x4").
      algorithm: a name of `mstrain.gemm.ALGORITHMS`.
      dataflow: `os` (y is stationary) or `ls` (x is stationary).
      slices: slice count of meshslice; by default 4, or the most that the sizes support, and 1 on CPUs.

    Returns: y [..., out] in the dtype of x, with tokens over (replica, data, row) and features over col. Sizes that do
      not divide are padded with zeros within the product. Raises ValueError when an argument is not legal.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x {x.shape} times w {w.shape}: the last dim of x must be the first of the two dims of w.")
    if dataflow not in DATAFLOWS:
        raise ValueError(f"dataflow={dataflow!r} is not {' or '.join(DATAFLOWS)}.")
    whole = _with_all_axes(mesh)
    plan = Plan(algorithm, dataflow, grid_of(algorithm, whole))
    hides = plan.kind.sliced and _platform(whole) != "cpu"
    inputs, outputs = (Span(n).to_multiple(unit) for n, unit in zip(w.shape, plan.units, strict=True))
    plan = _with_slices(plan, inputs.stored, outputs.stored, slices, 4 if hides else 1)
    return _multiply(x, w, plan, inputs, outputs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _multiply(x, w, plan: Plan, inputs: Span, outputs: Span):
    grid = plan.grid
    rows = x.reshape(-1, x.shape[-1])
    shards = grid.size(COPIES) * grid.num_rows
    padded = jnp.pad(rows, ((0, -len(rows) % shards), (0, 0)))
    storage = Storage(
        w.shape,
        segments=(outputs,),
        columns=grid.num_cols,
        rows=grid.num_rows,
        slices=plan.slices,
        transposed=plan.dataflow == "ls",
        first=inputs,
    )
    y = linear(inputs.pad(padded), storage.from_canonical(w), plan)
    return outputs.crop(y[: len(rows)]).reshape(*x.shape[:-1], w.shape[1])


def _with_slices(plan: Plan, in_dim: int, out_dim: int, slices: int | None, most: int) -> Plan:
    rows, cols = plan.grid.num_rows, plan.grid.num_cols
    legal = legal_slices(plan.dataflow, in_dim, out_dim, 1, rows, cols)
    if slices is None:
        slices = max(s for s in legal if s <= most)
    slices = operator.index(slices)
    if slices > 1 and not plan.kind.sliced:
        raise ValueError(f"slices={slices}: {plan.algorithm} does not slice. Leave it out, or use meshslice.")
    chosen = Plan(plan.algorithm, plan.dataflow, plan.grid, slices)
    chosen.check(in_dim, out_dim, 1, "mstrain.linear")
    return chosen


def _platform(mesh: Mesh) -> str:
    devices: Any = mesh.devices
    return devices.flat[0].platform


def _with_all_axes(mesh: Mesh | str) -> Mesh:
    """The same devices in the same order with all axes of mstrain, those that are left out of size 1."""
    if isinstance(mesh, str):
        return make_mesh(parse_mesh(mesh))
    if mesh.axis_names != tuple(axis for axis in AXES if axis in mesh.axis_names):
        raise ValueError(f"mesh has axes {mesh.axis_names}: take some of {', '.join(AXES)}, in this order.")
    sizes = tuple(mesh.shape.get(axis, 1) for axis in AXES)
    assert math.prod(sizes) == mesh.size
    devices: Any = mesh.devices
    return Mesh(devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
