"""`y = x @ w` computed by a plan, with its backward pass.

The backward pass of a dataflow uses the other two dataflows. The stationary matrix stays the same, and no matrix is
transposed in memory (MeshSlice paper, Table 1):

    dataflow   y             dx             dw
    os         OS(x, w)      LS(dy, w)      RS(x, dy)
    ls         LS(x, w)      OS(dy, w)      RS(dy, x)          w stored [out, in]
    rs         RS(x.T, w)    LS(w, dy).T    OS(x.T, dy)        x and y exchange rows and columns

The transposes of x are local to a device, and the compiler folds them into the product. dx comes out of its product
as it is sent (`ls_transposed`): the TPU compiler copies a transposed result before it scatters it. The residuals of the
backward pass are the shards of x and w; no gathered matrix is saved.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mstrain.gemm.copies import copies_of, sum_copies
from mstrain.gemm.grouped import Groups, Rows, dot_of
from mstrain.gemm.grouping import groups_spec
from mstrain.gemm.local import axis_size
from mstrain.gemm.plan import Plan
from mstrain.gemm.precision import Operand, quantize


def linear(
    x_TxI: jax.Array, w: jax.Array, plan: Plan, sink: jax.Array | None = None,
    groups: Groups | None = None, rows: Rows | None = None,
) -> jax.Array:  # fmt: skip
    """Multiplies activations by a weight in stored order, or by those of the experts that tokens chose.

    Args:
      x_TxI: tokens x features, sharded as `plan.input_layout`; its dtype is the dtype of the product.
      w: [in, out], or [out, in] for dataflow `ls`, sharded as `plan.grid.weight_spec`; any float dtype.
      plan: algorithm, dataflow, grid and slice count.
      sink: unused zeros [copies, *w.shape] whose gradient is that of w before it is summed over data-parallel replicas
        (`mstrain.models.prefetch`); w then has none. Not for algorithms that JAX differentiates.
      groups, rows: for weights of several experts [E, *w.shape], the experts of the tokens (`group_choices`), and the
        order of the rows of x and y, where rows replace tokens.

    Returns:
      y_TxO in the dtype of x, sharded as `plan.output_layout`. The gradient of w has the dtype of w, is summed over
      data-parallel replicas in float32 and sharded as `plan.grid.gradient_spec`.
    """
    if plan.kind.product:
        assert sink is None
        if groups is not None:
            return plan.kind.product(x_TxI, w, plan.grid, groups, rows)
        return plan.kind.product(x_TxI, w, plan.grid)
    return _linear(x_TxI, w, sink, groups, plan, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _linear(x, w, sink, groups, plan, rows):
    del sink
    flows = Flows(plan)

    def local(x, w, groups):
        ahead = dot_of(groups, rows, plan.grid)
        if plan.dataflow == "rs":
            return flows.rs(x.T, w.astype(x.dtype), dot=ahead)
        return (flows.os if plan.dataflow == "os" else flows.ls)(x, w, dot=ahead)

    in_specs = (plan.input_layout.spec, plan.grid.spec_of(w.shape), groups and groups_spec(plan))
    return flows.on_mesh(local, in_specs, plan.output_layout.spec)(x, w, groups)


def _forward(x, w, sink, groups, plan, rows):
    return _linear(x, w, sink, groups, plan, rows), (x, w, None if sink is None else (), groups)


def _backward(plan, rows, saved, dy):
    x, w, marker, groups = saved  # the third has no leaves, so it is known when the backward pass is traced
    has_sink = marker is not None
    flows, summed = Flows(plan), plan.grid.gradient_spec(w.shape)

    def gradients(x, w, dy, ahead, back):
        if plan.scheduling and plan.precision.is_full:
            assert groups is None, "products of experts have no scheduling groups"
            return flows.scheduled(x, w, dy)
        if plan.dataflow == "os":
            return flows.ls(dy, w, gradient=0, dot=back), flows.rs(x, dy, gradient=1, dot=ahead)
        if plan.dataflow == "ls":
            return flows.os(dy, w, gradient=0, dot=back), flows.rs(dy, x, gradient=0, dot=back)
        dx = flows.ls_transposed(w.astype(dy.dtype), dy, gradient=1, dot=back)
        return dx, flows.os(x.T, dy, gradient=1, dot=ahead)

    def local(x, w, dy, groups):
        dx, dw = gradients(x, w, dy, dot_of(groups, rows, plan.grid), dot_of(groups, rows and rows.reversed, plan.grid))
        if has_sink:
            return dx, dw[None]
        return dx, sum_copies(dw.astype(jnp.float32), summed, plan.grid.copies).astype(w.dtype)

    input_spec, weight_spec = plan.input_layout.spec, plan.grid.spec_of(w.shape)
    gradient_spec = P(copies_of(weight_spec, plan.grid.copies), *weight_spec) if has_sink else summed
    in_specs = (input_spec, weight_spec, plan.output_layout.spec, groups and groups_spec(plan))
    dx, dw = flows.on_mesh(local, in_specs, (input_spec, gradient_spec))(x, w, dy, groups)
    return (dx, None, dw, None) if has_sink else (dx, dw, None, None)


_linear.defvjp(_forward, _backward)


# Of the operands (A, B) of a dataflow: the contracted dims, and whether the matrix is gathered. Rows shard dim 0 of
# every matrix, columns dim 1.
_CONTRACTED = {"os": (1, 0), "ls": (1, 1), "rs": (0, 0)}
_GATHERED = {"os": (True, True), "ls": (False, True), "rs": (True, False)}


class Flows:
    """The three dataflows of a plan's algorithm, bound to its grid, slice count, lowering and precision.

    `flow(a, b, gradient, dot)` is called in `shard_map`. Operand number `gradient`, if any, is the gradient of a
    result, and `dot` replaces the local product.
    """

    def __init__(self, plan: Plan):
        kind = plan.kind
        assert kind.os and kind.ls and kind.rs, f"{kind.name} has a product in the place of dataflows"
        ls = kind.ls
        how = {"rows": plan.grid.rows, "cols": plan.grid.cols, "slices": plan.slices}
        if kind.sliced:
            how["lowering"] = plan.lowering
        if plan.scheduling:
            assert kind.scheduled, f"{kind.name} has no scheduling groups"
            self.scheduled = functools.partial(kind.scheduled, plan.dataflow, plan.scheduling, **how)
        self._plan = plan
        self.os = self._flow("os", functools.partial(kind.os, **how))
        self.ls = self._flow("ls", functools.partial(ls, **how))
        self.rs = self._flow("rs", functools.partial(kind.rs, **how))
        transposed = kind.ls_transposed or (lambda *a, **how: ls(*a, **how).T)
        self.ls_transposed = self._flow("ls", functools.partial(transposed, **how))

    def _flow(self, name: str, function: Callable) -> Callable:
        precision, shards = self._plan.precision, (self._plan.grid.rows, self._plan.grid.cols)
        if precision.is_full:
            return lambda a, b, gradient=None, **how: function(a, b, **how)

        def flow(a, b, gradient: int | None = None, **how):
            operands = []
            for i, x in enumerate((a, b)):
                gathered = _GATHERED[name][i] and axis_size(shards[1 - i]) > 1
                operand = Operand(_CONTRACTED[name][i], shards, gradient == i)
                rounds = gathered or precision.products != "bf16"
                operands.append(quantize(x, operand, precision, a.dtype) if rounds else x)
            return function(*operands, **how)

        return flow

    def on_mesh(self, function, in_specs, out_specs):
        """Maps `function`, which takes and returns shards, over the mesh with `jax.shard_map`."""
        # check_vma=False: every output is sharded over all axes or summed over `data` explicitly.
        mesh = self._plan.grid.mesh
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
