"""The parallel degrees of a step, and the devices of its ranks."""

from dataclasses import dataclass
from typing import Any

import numpy as np

# The devices that take part in an operation of a rank:
#   LOCAL   its own device
#   TENSOR  all tensor-parallel ranks of its replica and stage
#   DATA    the same rank of all data-parallel replicas
#   SEND    its own device and that of the same rank on stage `peer`
#   ROW     the ranks of its mesh column, which differ in the row (if the tensor-parallel ranks form a mesh)
#   COL     the ranks of its mesh row, which differ in the column
#   GROUP   a group of `Step.groups`
#   STAGES  the same rank on all stages
LOCAL, TENSOR, DATA, SEND, ROW, COL, GROUP, STAGES = range(8)


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of a plan.

    Attributes:
      interleave: number of chunks of layers per pipeline stage.
      cols: columns of the mesh of the tensor-parallel ranks, which are numbered row by row; 1 if they form no mesh.
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
        """The ranks that take part in an operation of rank 0 along `axis`, numbered replica by replica."""
        first, count = {
            LOCAL: (1, 1), SEND: (1, 1), STAGES: (1, 1), TENSOR: (1, self.tensor), DATA: (self.tensor, self.data),
            ROW: (self.cols, self.rows), COL: (1, self.cols),
        }[axis]  # fmt: skip
        return first * np.arange(count)


@dataclass(frozen=True)
class Placement:
    """The device of every rank: devices are numbered from `first`, over the axes `order`, the last one fastest."""

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
