"""Muon: momentum whose singular values are made equal, by products on the mesh (Jordan et al., 2024).

A Newton-Schulz iteration of five steps multiplies a matrix X by polynomials of X X^T. X stays sharded over rows and
columns, and the products are those of `mstrain.gemm`: `collective` on a grid, and `summa`, which never gathers a whole
matrix, on a line of devices. Permuting or padding X permutes or pads the result, so storage order does not matter.
Updates are scaled to the root mean square that AdamW's have (Liu et al., 2025, "Muon is scalable for LLM training").
"""

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from mstrain.gemm import Flows, Plan
from mstrain.gemm.copies import axes_of
from mstrain.gemm.grid import Grid
from mstrain.layers.parameter import Stored
from mstrain.models.parameters import abstract_parameters, is_masked
from mstrain.models.stages import AXIS as STAGE

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Jordan et al.: steep at zero
STEPS = 5
RMS = 0.2  # of an update of AdamW, Liu et al., section 2.2


def orthogonalize() -> optax.GradientTransformationExtraArgs:
    """Replaces every stored kernel [in, out], or stack of them [L, in, out], by 0.2 sqrt(max(in, out)) U V^T, where
    U S V^T is its singular value decomposition. Its `update` takes the `module` of the parameters."""

    def update(updates, state, params=None, **place):
        del params
        module = place["module"]

        def of_parameter(x, box):
            return x if is_masked(x) else _orthogonal(x, box, module.plan.mesh, module.dtype)

        return jax.tree.map(of_parameter, updates, abstract_parameters(module), is_leaf=is_masked), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _orthogonal(x, box: Stored, mesh: Mesh, dtype):
    """Of the matrices in `x`, a layer at a time; stages of a pipeline work side by side."""
    grid, scale = _grid(box, mesh), RMS * math.sqrt(max(box.storage.shape[-2:]))

    def of_matrices(x):
        return scale * _newton_schulz(x, grid, dtype) if x.ndim == 2 else lax.map(of_matrices, x)

    if x.ndim == 2 or box.spec[0] != STAGE:
        return of_matrices(x)
    by_stage = x.reshape(mesh.shape[STAGE], -1, *x.shape[1:])
    return jax.vmap(of_matrices, spmd_axis_name=STAGE)(by_stage).reshape(x.shape)


def _grid(box: Stored, mesh: Mesh) -> Grid:
    """The mesh axes that shard a kernel as rows and columns; those of a 1-D algorithm are divided into both."""
    rows, cols = map(axes_of, box.spec[-2:])
    if not (rows and cols):
        long = [axis for axis in (*rows, *cols) if mesh.shape[axis] > 1]
        rows, cols = tuple(long[:1]), tuple(long[1:])
    return Grid(mesh, rows, cols)


def _newton_schulz(x_RxC, grid: Grid, dtype):
    """The iteration in `dtype` on one matrix, sharded over `grid`; float32 [R, C]."""
    unit = math.lcm(grid.num_rows, grid.num_cols)
    R, C = x_RxC.shape
    x = x_RxC.astype(jnp.float32)
    x = (x / (jnp.linalg.norm(x) + 1e-8)).astype(dtype)
    x = jnp.pad(x, [(0, -R % unit), (0, -C % unit)])
    x = lax.with_sharding_constraint(x, NamedSharding(grid.mesh, grid.weight_spec))
    line = 1 in (grid.num_rows, grid.num_cols)
    flows = Flows(Plan("summa" if line else "collective", "os", grid))
    first, second, third = COEFFICIENTS

    def step(_, x):
        square = flows.ls(x, x) if R <= C else flows.rs(x, x)
        factor = second * square + third * flows.os(square, square)
        return first * x + (flows.os(factor, x) if R <= C else flows.os(x, factor))

    iterate = flows.on_mesh(lambda x: lax.fori_loop(0, STEPS, step, x), grid.weight_spec, grid.weight_spec)
    return iterate(x)[:R, :C].astype(jnp.float32)
