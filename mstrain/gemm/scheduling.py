"""Scheduling groups: collectives that a TPU's compiler runs beside chosen products.

XLA's latency hiding scheduler starts, runs and completes the members of a group together, and leaves the order of all
other operations open. The annotation may stand on collectives and `dot_general` only, one SparseCore runs one
collective of a group, no path from one member to another may lead through other operations, and an id may stand for
one group of a computation (the body of the loop over layers) only.
"""

import contextlib
import contextvars
import dataclasses

from jax.experimental.xla_metadata import set_xla_metadata


@dataclasses.dataclass(frozen=True)
class SchedulingGroups:
    """Ids of the groups of operations in the backward pass of one product, None for those in no group.

    Attributes:
      gathers: of the all_gather of each slice of dy, with dataflow `ls`.
      last_sum: of the last reduce_scatter of dx, with dataflow `os`; one that is computed transposed has none.
      products: of the product of each slice of the weight gradient, with dataflow `ls`.
    """

    gathers: tuple[int | None, ...] = ()
    last_sum: int | None = None
    products: tuple[int | None, ...] = ()

    def gather(self, s: int) -> int | None:
        return self.gathers[s] if self.gathers else None

    def product(self, s: int) -> int | None:
        return self.products[s] if self.products else None


_ignored = contextvars.ContextVar("scheduling groups are ignored", default=False)


@contextlib.contextmanager
def without_groups():
    """A context in which programs are traced without groups, those that JAX has traced before excepted."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


def in_group(group: int | None):
    """A context whose operations are in `group`; None for no group."""
    if group is None or _ignored.get():
        return contextlib.nullcontext()
    return set_xla_metadata(_scheduling_group_id=str(group))
