"""How many ways a step is split, and which device does which part."""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Which devices an operation involves: its own, its tensor ranks, its data replicas, its own and that of the stage
# `peer`; where the tensor ranks form a mesh those of its column, which differ in their row, and those of its row; a
# group that the step lists; or its own of every stage.
LOCAL, TENSOR, DATA, SEND, ROW, COL, GROUP, STAGES = range(8)


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of a plan.

    `interleave` is the number of model chunks per pipeline stage; `cols` the columns of the mesh that the
    tensor ranks form, numbered row by row (1 where they form none).
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    interleave: int = 1
    cols: int = 1

    @property
    def rows(self) -> int:
        return self.tensor // self.cols

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline

    def members(self, axis: int) -> np.ndarray:
        """The tensor ranks, numbered replica by replica, that an operation of the first one along `axis` involves."""
        first, count = {
            LOCAL: (1, 1), SEND: (1, 1), STAGES: (1, 1), TENSOR: (1, self.tensor), DATA: (self.tensor, self.data),
            ROW: (self.cols, self.rows), COL: (1, self.cols),
        }[axis]  # fmt: skip
        return first * np.arange(count)


@dataclass(frozen=True)
class Placement:
    """Numbers the workers from `first` up; `order` lists the axes from outermost to innermost."""

    degrees: Degrees
    order: tuple[str, ...] = ("data", "tensor", "pipeline")
    first: int = 0

    def worker(self, replica, rank, stage):
        """Device number of (replica, rank, stage); integers or arrays of them."""
        at: dict[str, Any] = {"data": replica, "tensor": rank, "pipeline": stage}
        number: Any = 0
        for axis in self.order:
            number = number * getattr(self.degrees, axis) + at[axis]
        return self.first + number
