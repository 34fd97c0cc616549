"""The one writer of pipelined step programs: passes in the order of a schedule, each followed by its messages.

What a pass consists of is the business of a `PipelineStep`: DistIR's perceptron and GPT-2, the transformer of a plan,
or the profiled layers of a mixed cluster. It writes a pass once; `Layout` repeats it for every microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mstrain.simulator.placement import SEND, Degrees
from mstrain.simulator.program import OpSpec
from mstrain.simulator.replicas import Layout, Step
from mstrain.simulator.schedules import FORWARD, Schedule
from mstrain.simulator.slots import RankOp, Slots


class PipelineStep(ABC):
    """The training step of one rank. Chunk c of `chunks` runs on stage c mod `degrees.pipeline`."""

    def __init__(self, degrees: Degrees, chunks: int):
        self.degrees, self.chunks, self.slots = degrees, chunks, Slots()

    def stage(self, chunk: int) -> int:
        """The stage of a chunk."""
        return chunk % self.degrees.pipeline

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple:
        """What tells this pass from those of other microbatches; further arguments of `forward` and `backward`."""
        return ()

    def begin(self) -> Sequence[RankOp]:
        """What comes before all passes."""
        return ()

    @abstractmethod
    def forward(self, chunk: int, *variant) -> Sequence[RankOp]:
        """The forward pass of a chunk."""

    def backward(self, chunk: int, *variant) -> Sequence[RankOp]:
        """The backward pass of a chunk; a step without one has no such tasks in its schedule."""
        raise AssertionError("this step has no backward pass")

    def messages(self, chunk: int, other: int, direction: int) -> Sequence[tuple[OpSpec, int, int]]:
        """(operation, value, its copy on arrival) of every message from `chunk` to the chunk `other`."""
        return ()

    def send(self, chunk: int, direction: int) -> Sequence[RankOp]:
        """The messages that follow a pass."""
        other = chunk + 1 if direction == FORWARD else chunk - 1
        if not 0 <= other < self.chunks or self.stage(other) == self.stage(chunk):
            return ()
        here, there, label = self.stage(chunk), self.stage(other), ("to chunk", other)
        return [
            RankOp(spec, SEND, here, (value,), (arrival,), there, label)
            for spec, value, arrival in self.messages(chunk, other, direction)
        ]

    def finish(self) -> Sequence[RankOp]:
        """What comes after all passes."""
        return ()

    def write(self, schedule: Schedule) -> Step:
        """The whole step."""
        layout, last = Layout(), self.degrees.microbatches - 1
        layout.add(("begin",), 0, self.begin)
        for tasks in schedule:
            written = [(task, self.variant(*task[1:])) for task in tasks]
            for (_, chunk, direction, microbatch), variant in written:
                run = self.forward if direction == FORWARD else self.backward
                layout.add((chunk, direction, variant), microbatch, run, chunk, *variant)
            for (_, chunk, direction, microbatch), variant in written:
                layout.add((chunk, direction, variant, "send"), microbatch, self.send, chunk, direction)
        layout.add(("finish",), last, self.finish)
        return layout.step(self.degrees, self.slots)
