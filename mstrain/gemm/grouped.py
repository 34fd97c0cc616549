"""Products of tokens with the weights of the experts that they chose.

A weight is [E, in, out] for E experts; its last two dims are sharded as those of a dense weight. All devices of a row
of the grid have the same tokens and sort them by expert in the same way, so an algorithm keeps the collectives of its
dense product and takes another local product (`GroupedDot` in place of `mstrain.gemm.local.dot`). A token chooses K
experts. Rows of activations have one of three orders:

* `TOKENS`: a row per token.
* `CHOICES`: a row per token and expert that it chose, token by token.
* `SORTED`: the rows of `CHOICES` sorted by expert.

The local product repeats and sorts tokens after they are gathered, and adds the results of a token's experts before
they are reduce-scattered, so collectives communicate tokens and not choices. Between the two products of an MLP rows
are `SORTED`. With dataflow `rs`, which reduce-scatters them over rows of the grid, they are `CHOICES`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mstrain.gemm.grid import Grid
from mstrain.gemm.local import NN, NT, TN, dot, rounded_dot
from mstrain.gemm.ragged import multiply, sum_products

TOKENS, CHOICES, SORTED = "tokens", "choices", "sorted"
ROW_MAJOR = Layout((0, 1))


class Groups(NamedTuple):
    """The choices of the tokens that a device multiplies, T tokens with K choices each, int32.

    Attributes:
      choices: [T * K], the choice in every sorted row; T * K in a row without one.
      rows: [T * K], the sorted row of every choice; T * K for a choice that is dropped.
      sizes: [E], number of sorted rows of each expert; rows after them are empty.
    """

    choices: Any
    rows: Any
    sizes: Any

    def sort(self, x, order: str, whole: bool = False):
        """Sorted rows of x, which is in `order`; zeros in empty rows, of which `whole` groups have none."""
        if order == SORTED:
            return x
        chosen = len(self.rows) // len(x)  # K for tokens, 1 for choices
        return _rows(x, self.choices // chosen, whole)

    def unsort(self, y, rows: "Rows"):
        """Sorted rows y in the order `rows.after`; for tokens the sum of the results of each."""
        if rows.after == SORTED:
            return y
        if rows.after == CHOICES:
            return _rows(y, self.rows, rows.whole)
        return sum_choices(y, self.rows.reshape(-1, rows.chosen), rows.whole)


def _rows(x, rows, whole: bool):
    return x.at[rows].get(mode="promise_in_bounds") if whole else x.at[rows].get(mode="fill", fill_value=0)


def sum_choices(y, rows_TxK, whole: bool = False):
    """The sum of the rows of y that every token has, float32 [T, F]; zeros for rows behind all, unless `whole`.

    One choice of all tokens is added after the other: XLA's estimate of the sum over a dim of two for a TPU is ten
    times that of two gathers and an addition.
    """
    each = (_rows(y, rows_TxK[:, k], whole) for k in range(rows_TxK.shape[1]))
    return functools.reduce(jnp.add, (rows.astype(jnp.float32) for rows in each))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Order of the rows of the input and of the output of a product, and number of experts that a token chooses.

    `whole`: whether every sorted row has a choice, and every choice a row.
    """

    before: str
    after: str
    chosen: int
    whole: bool = False

    @property
    def reversed(self) -> "Rows":
        return dataclasses.replace(self, before=self.after, after=self.before)


@dataclasses.dataclass(frozen=True)
class GroupedDot:
    """`mstrain.gemm.local.dot` with one operand or the result [E, ., .]; float32 accumulation, rounded once.

    Attributes:
      groups: of the tokens in the operands.
      rows: order of the rows of the first operand with tokens, and of the result or the second one.
      platform: of the devices.
    """

    groups: Groups
    rows: Rows
    platform: str

    def __call__(self, a, b, contract, dtype=None):
        dtype = dtype or a.dtype
        if a.ndim == 3:  # W A^T of dataflow rs
            return self._tokens(b, a, contract, dtype).T
        if b.ndim == 3:
            return self._tokens(a.T, b, NN, dtype) if contract == TN else self._tokens(a, b, contract, dtype)
        return self._weights(a.T if contract == NN else a, b, dtype)

    def _tokens(self, a, w, contract, dtype):
        """a W or, for NT, a W^T."""
        a = self.groups.sort(a, self.rows.before, self.rows.whole)
        y = multiply(a, w, self.groups.sizes, contract == NT, self.platform, dtype)
        y = self.groups.unsort(y, self.rows).astype(dtype)
        # Where the residual stream is stored by columns, XLA turns the sum, and not each of its parts.
        return with_layout_constraint(y, ROW_MAJOR) if self.platform == "tpu" and self.rows.after == TOKENS else y

    def _weights(self, a, b, dtype):
        """a^T b of the tokens of every expert."""
        a, b = (
            self.groups.sort(x, order, self.rows.whole) for x, order in ((a, self.rows.before), (b, self.rows.after))
        )
        return sum_products(a, b, self.groups.sizes, self.platform, dtype)


def dot_of(groups: Groups | None, rows: Rows | None, grid: Grid):
    """The local product on `grid` of dense weights, or of those of experts."""
    if groups is None or rows is None:
        return rounded_dot if grid.platform == "gpu" else dot
    return GroupedDot(groups, rows, grid.platform)
