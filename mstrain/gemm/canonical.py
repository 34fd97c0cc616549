"""`y = x @ w` for ordinary arrays: any leading dims, weights [in, out] in canonical order, sizes that do not divide."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import axes_of
from mstrain.gemm.linear import linear
from mstrain.gemm.padding import Span
from mstrain.gemm.plan import Plan, grid_of, legal_slices
from mstrain.mesh import AXES, lacks_emulated, make_mesh, parse_mesh

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
        Inside `jax.set_mesh` it is that mesh.
      algorithm: a name of `mstrain.gemm.ALGORITHMS`.
      dataflow: `os` (y is stationary) or `ls` (x is stationary).
      slices: slice count of meshslice; by default 4, or the most that the sizes support, and 1 on CPUs.

    Returns: y [..., out] in the dtype of x, with tokens over (replica, data, row) and features over col. Sizes that do
      not divide are padded with zeros within the product. Raises ValueError when an argument is not legal.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x {x.shape} times w {w.shape}: the last dim of x must be the first of the two dims of w.")
    if jnp.issubdtype(w.dtype, jnp.inexact) and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(f"x is {x.dtype} and would round w, which is {w.dtype}. Type x.astype({str(w.dtype)!r}).")
    plan = plan_of((w.shape[0], w.shape[1]), mesh, algorithm, dataflow, slices)
    sharding = _output_sharding((*x.shape[:-1], w.shape[1]), plan) if _has_explicit_axes(x, w) else None
    return _multiply(x, w, plan, sharding)


def plan_of(
    shape: tuple[int, int], mesh: Mesh | str, algorithm: str, dataflow: str = "os", slices: int | None = None
) -> Plan:
    """The plan of a product with a weight [in, out] of this shape; arguments and errors of `multiply`."""
    if dataflow not in DATAFLOWS:
        raise ValueError(f"dataflow={dataflow!r} is not {' or '.join(DATAFLOWS)}.")
    plan = Plan(algorithm, dataflow, grid_of(algorithm, _with_auto_axes(mesh)))
    if plan.kind.product and dataflow != plan.kind.only_dataflow:
        raise ValueError(f"dataflow={dataflow!r}: {algorithm} leaves it to the compiler. Leave it out.")
    inputs, outputs = _spans(shape, plan)
    most = 4 if plan.kind.sliced and plan.grid.platform != "cpu" else 1
    return _with_slices(plan, inputs.stored, outputs.stored, slices, most)


def canonical_specs(shape: tuple[int, int], plan: Plan) -> tuple[P, P]:
    """The shardings of a canonical weight [in, out] and of a bias [out]; dims that do not divide are not sharded."""
    rows, cols = plan.grid.weight_spec
    weight = _dividing(shape, (rows, cols) if plan.dataflow == "os" else (cols, rows), plan)
    return weight, _dividing(shape[1:], [plan.grid.layout.features], plan)


def sharding_like(x: jax.Array, spec: P, plan: Plan) -> NamedSharding:
    """`spec` on the plan's mesh, with axes of the kind that x has (automatic or explicit)."""
    kind = AxisType.Explicit if _has_explicit_axes(x) else AxisType.Auto
    return NamedSharding(_retyped(plan.grid.mesh, kind), spec)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _multiply(x, w, plan: Plan, sharding: NamedSharding | None):
    """The product; `sharding` is that of y where arrays have explicit ones."""
    if sharding is None:
        return _product(x, w, plan)
    automatic: Any = jax.sharding.auto_axes(lambda x, w: _product(x, w, plan), out_sharding=sharding)
    return automatic(x, w)


def _product(x, w, plan: Plan):
    inputs, outputs = _spans(w.shape, plan)
    rows = x.reshape(-1, x.shape[-1])
    shards = plan.grid.size(plan.grid.layout.tokens)
    padded = jnp.pad(rows, ((0, -len(rows) % shards), (0, 0)))
    y = linear(inputs.pad(padded), plan.storage(inputs, (outputs,)).from_canonical(w), plan)
    return outputs.crop(y[: len(rows)]).reshape(*x.shape[:-1], w.shape[1])


def _spans(shape: tuple[int, int], plan: Plan) -> tuple[Span, Span]:
    """Input and output features with the padding that the plan needs."""
    inputs, outputs = (Span(size).to_multiple(unit) for size, unit in zip(shape, plan.units, strict=True))
    return inputs, outputs


def _with_slices(plan: Plan, in_dim: int, out_dim: int, slices: int | None, most: int) -> Plan:
    rows, cols = plan.grid.num_rows, plan.grid.num_cols
    legal = legal_slices(plan.dataflow, in_dim, out_dim, 1, rows, cols)
    if slices is None:
        slices = max(s for s in legal if s <= most)
    slices = operator.index(slices)
    if slices > 1 and not plan.kind.sliced:
        raise ValueError(f"slices={slices}: {plan.algorithm} does not slice. Leave it out, or use meshslice.")
    chosen = Plan(plan.algorithm, plan.dataflow, plan.grid, slices)
    chosen.check(in_dim, out_dim, 1, "mstrain.linear", prefix="")
    return chosen


def _dividing(shape: tuple[int, ...], entries, plan: Plan) -> P:
    """A spec of `entries` for the dims that divide by them."""
    groups = [axes_of(entry) for entry in entries]
    return P(*(axes if axes and size % plan.grid.size(axes) == 0 else None for size, axes in zip(shape, groups)))


def _has_explicit_axes(*arrays: jax.Array) -> bool:
    """Whether JAX keeps shardings in the types of arrays here (`AxisType.Explicit`)."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return any(AxisType.Explicit in each.axis_types for each in meshes if not each.empty)


def _output_sharding(shape: tuple[int, ...], plan: Plan) -> NamedSharding:
    """The explicit sharding of y: tokens over its first dim."""
    tokens, features = plan.grid.layout.tokens, plan.grid.layout.features
    entries = [tokens, *[None] * (len(shape) - 2), features] if len(shape) > 1 else [features]
    return NamedSharding(_retyped(plan.grid.mesh, AxisType.Explicit), _dividing(shape, entries, plan))


def _with_auto_axes(mesh: Mesh | str) -> Mesh:
    """The mesh, which the compiler shards over. Raises ValueError for other axes than those of mstrain."""
    if isinstance(mesh, str):
        shape = parse_mesh(mesh)
        if lacks_emulated(shape.devices):
            raise ValueError(
                f"mesh={mesh} needs {shape.devices} devices, and this CPU has {jax.device_count()}. Call "
                f"mstrain.emulate_devices({shape.devices}) before the first use of JAX, or pass a smaller mesh."
            )
        return make_mesh(shape)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={mesh!r} is neither a jax.sharding.Mesh nor text such as '2x4'.")
    if mesh.axis_names != tuple(axis for axis in AXES if axis in mesh.axis_names):
        raise ValueError(f"mesh has axes {mesh.axis_names}: take some of {', '.join(AXES)}, in this order.")
    return _retyped(mesh, AxisType.Auto)


def _retyped(mesh: Mesh | AbstractMesh, kind: AxisType) -> Mesh:
    devices: Any = mesh.devices
    return Mesh(devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
