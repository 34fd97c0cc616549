"""A program of a case with what a table says of it."""

import dataclasses
from collections.abc import Callable

from mstrain.program.program import Program


@dataclasses.dataclass(frozen=True)
class Work:
    """One program of a case.

    Attributes:
      part: what it is: `step`, `layer`, or the name of a product.
      plan: its dataflows and slice counts, in words.
      program: what is compiled.
      start: creates its arguments on the devices.
      tokens, flops: of one execution, whole job; model FLOPs, recomputation not counted.
      carries: the first result is the first argument of the next execution.
    """

    part: str
    plan: str
    program: Program
    start: Callable[[], tuple]
    tokens: int
    flops: float
    carries: bool = False
