"""GSPMD: constrain the shardings of operands and result; the compiler chooses the communication.

Recent TPU compilers choose the ring of `mstrain.gemm.wang` along one axis and a whole collective along the other.
"""

import jax
from jax.sharding import PartitionSpec as P

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.grid import Grid


def product(x_TxI, w_IxO, grid: Grid):
    """Y = X W with tokens over rows and features over columns; differentiated by JAX."""
    w_IxO = w_IxO.astype(x_TxI.dtype)
    if all(grid.size(axes) > 1 for axes in (grid.copies, *((axis,) for axis in (*grid.rows, *grid.cols)))):
        # With data, row and col all in use, XLA partitions this product wrongly (seen with jaxlib 0.10.2: an operand is
        # permuted and the result not permuted back, so gradients are wrong). Gathering the weight's rows avoids it.
        w_IxO = jax.lax.with_sharding_constraint(w_IxO, grid.sharding(P(None, grid.cols)))
    y_TxO = x_TxI @ w_IxO
    return jax.lax.with_sharding_constraint(y_TxO, grid.sharding(grid.layout.spec))


ALGORITHM = Algorithm("gspmd", product=product, dataflows=("os",))
