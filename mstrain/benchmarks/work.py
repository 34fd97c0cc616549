"""A program of a case and the values of its row in the table."""

import dataclasses
from collections.abc import Callable

from mstrain.program.program import Program


@dataclasses.dataclass(frozen=True)
class Work:
    """One program of a case.

    Attributes:
      part: `step`, `layer`, `nongemm` or the name of a product.
      plan: its dataflows and slice counts as text.
      program: the program.
      start: creates its arguments on the devices.
      tokens, flops: of one execution of the whole job; model FLOPs without recomputation.
      carries: whether the first result is the first argument of the next execution.
    """

    part: str
    plan: str
    program: Program
    start: Callable[[], tuple]
    tokens: int
    flops: float
    carries: bool = False
