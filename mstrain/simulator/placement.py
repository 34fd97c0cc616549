"""How many ways a step is split, and which device does which part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Which devices an operation involves: its own, its tensor ranks, its data replicas, the next stage, or
# (where the tensor ranks form a mesh) those of its column, which differ in their row, and those of its row; or a group
# that the placement lists.
LOCAL, TENSOR, DATA, SEND, ROW, COL, GROUP = range(7)


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


@dataclass(frozen=True)
class Placement:
    """Numbers the workers from `first` up; `order` lists the axes from outermost to innermost, `groups` the members
    of operations along GROUP, whose `peer` is a number of such a group.
    """

    degrees: Degrees
    order: tuple[str, ...] = ("data", "tensor", "pipeline")
    first: int = 0
    groups: tuple[tuple[int, ...], ...] = ()

    def strides(self) -> tuple[int, int, int]:
        """Steps in device number along data, tensor and pipeline."""
        strides, stride = {}, 1
        for axis in reversed(self.order):
            strides[axis] = stride
            stride *= getattr(self.degrees, axis)
        return strides["data"], strides["tensor"], strides["pipeline"]

    def worker(self, replica, rank, stage):
        """Device number of (replica, rank, stage); integers or arrays of them."""
        data, tensor, pipeline = self.strides()
        return self.first + replica * data + rank * tensor + stage * pipeline

    def group(self, axis: int, replica: int, rank: int, stage: int, peer: int) -> Sequence[int]:
        """The devices of one operation along `axis`."""
        data, tensor, _ = self.strides()
        here = self.worker(replica, rank, stage)
        if axis == GROUP:
            return self.groups[peer]
        if axis == TENSOR:
            return range(here, here + tensor * self.degrees.tensor, tensor)
        if axis == ROW:
            step = tensor * self.degrees.cols
            return range(here, here + step * self.degrees.rows, step)
        if axis == COL:
            return range(here, here + tensor * self.degrees.cols, tensor)
        if axis == DATA:
            return range(here, here + data * self.degrees.data, data)
        return (here, self.worker(replica, rank, peer)) if axis == SEND else (here,)
