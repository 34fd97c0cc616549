"""GSPMD: constrain the shardings of operands and result; the compiler chooses the communication.

Recent TPU compilers choose the ring of `mstrain.gemm.wang` along one axis and a whole collective along the other.
"""

import jax
from jax.sharding import PartitionSpec as P

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.grid import Grid
from mstrain.gemm.grouped import GroupedDot, Groups, Rows
from mstrain.gemm.local import NN


def product(x_TxI, w_IxO, grid: Grid, groups: Groups | None = None, rows: Rows | None = None):
    """Y = X W with tokens over rows and features over columns, or of several experts; differentiated by JAX."""
    if groups is not None and rows is not None:
        return _grouped(x_TxI, w_IxO, grid, groups, rows)
    w_IxO = w_IxO.astype(x_TxI.dtype)
    if all(grid.size(axes) > 1 for axes in (grid.copies, *((axis,) for axis in (*grid.rows, *grid.cols)))):
        # With data, row and col all in use, XLA partitions this product wrongly (seen with jaxlib 0.10.2: an operand is
        # permuted and the result not permuted back, so gradients are wrong). Gathering the weight's rows avoids it.
        w_IxO = jax.lax.with_sharding_constraint(w_IxO, grid.sharding(P(None, grid.cols)))
    y_TxO = x_TxI @ w_IxO
    return jax.lax.with_sharding_constraint(y_TxO, grid.sharding(grid.layout.spec))


def _grouped(x, w, grid: Grid, groups: Groups, rows: Rows):
    """The products of experts, with operands gathered by constraints."""
    tokens = P(grid.layout.tokens)
    x = jax.lax.with_sharding_constraint(x, grid.sharding(tokens))
    whole = P(grid.spec_of(w.shape)[0], None, grid.cols)
    w = jax.lax.with_sharding_constraint(w.astype(x.dtype), grid.sharding(whole))
    local = jax.shard_map(
        lambda x, w, groups: GroupedDot(groups, rows, grid.platform)(x, w, NN),
        mesh=grid.mesh, in_specs=(tokens, whole, tokens), out_specs=grid.layout.spec,
        check_vma=False,
    )  # fmt: skip
    return local(x, w, groups)


ALGORITHM = Algorithm("gspmd", product=product, dataflows=("os",), grouped=("os",))
