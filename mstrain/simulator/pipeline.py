"""Writes the operations of a pipelined step: the passes in the order of a schedule, each followed by its messages.

A subclass of `PipelineStep` defines the operations of a pass: those of DistIR's perceptron, of the transformer of a
plan, or of the profiled layers of a mixed cluster. The operations of a pass are added once and repeated for every
microbatch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from mstrain.parallel.schedules import FORWARD, WAIT, WEIGHTS, Schedule
from mstrain.simulator.placement import SEND, Degrees
from mstrain.simulator.program import OpSpec
from mstrain.simulator.replicas import Step
from mstrain.simulator.slots import RankOp, Slots


class PipelineStep(ABC):
    """The training step of one rank. Chunk c of `chunks` runs on stage c mod `degrees.pipeline`."""

    def __init__(self, degrees: Degrees, chunks: int):
        self.degrees, self.chunks, self.slots = degrees, chunks, Slots()
        self.ops: list[RankOp] = []
        self.groups: dict[tuple[int, ...], int] = {}  # devices of operations along GROUP -> number

    def add(
        self, spec: OpSpec, axis: int, stage: int, inputs: Iterable[int] = (), outputs: Iterable[int] = (),
        peer: int = -1, label: tuple = (),
    ) -> None:  # fmt: skip
        """Adds an operation to the pass that is being written; the arguments are the fields of `RankOp`."""
        self.ops.append(RankOp(spec, axis, stage, tuple(inputs), tuple(outputs), peer, label))

    def stage(self, chunk: int) -> int:
        """The stage of a chunk."""
        return chunk % self.degrees.pipeline

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple:
        """Further arguments of the function that writes this pass; passes with equal ones have the same operations."""
        return ()

    def begin(self) -> None:  # noqa: B027 - most steps have none
        """Adds the operations before all passes."""

    @abstractmethod
    def forward(self, chunk: int, *variant) -> None:
        """Adds the forward pass of a chunk."""

    def backward(self, chunk: int, *variant) -> None:
        """Adds the backward pass of a chunk; not called if the schedule has no backward passes."""
        raise AssertionError("this step has no backward pass")

    def weight_gradients(self, chunk: int, *variant) -> None:
        """Adds the weight gradients of a chunk, if the schedule computes them after the backward pass (zero-bubble)."""
        raise AssertionError("this step makes all gradients in its backward passes")

    def wait(self, chunk: int, direction: int) -> None:
        """Adds a pass whose results are discarded: stages in lockstep compute also in ticks without a microbatch."""
        raise AssertionError("this step has no lockstep")

    def messages(self, chunk: int, other: int, direction: int) -> Sequence[tuple[OpSpec, int, int]]:
        """(operation, value sent, value received) of every message from `chunk` to the chunk `other`."""
        return ()

    def send(self, chunk: int, direction: int) -> None:
        """Adds the messages that follow a pass."""
        other = chunk + 1 if direction == FORWARD else chunk - 1
        if direction == WEIGHTS or not 0 <= other < self.chunks or self.stage(other) == self.stage(chunk):
            return
        for spec, value, arrival in self.messages(chunk, other, direction):
            self.add(spec, SEND, self.stage(chunk), (value,), (arrival,), self.stage(other), ("to chunk", other))

    def finish(self) -> None:  # noqa: B027 - inference has none
        """Adds the operations after all passes."""

    def write(self, schedule: Schedule) -> Step:
        """The step with the passes of `schedule`."""
        written: dict[tuple, np.ndarray] = {}  # rows of `ops` by kind of pass
        order: list[tuple[np.ndarray, int]] = []  # rows and microbatch of every pass

        def run(microbatch, variant, write, *arguments):
            key = write, *arguments, variant
            if key not in written:
                begin = len(self.ops)
                write(*arguments)
                written[key] = np.arange(begin, len(self.ops))
            order.append((written[key], microbatch))

        run(0, (), self.begin)
        kinds = self.forward, self.backward, self.weight_gradients
        for tasks in schedule:
            passes = []
            for _, chunk, direction, microbatch in tasks:
                if microbatch == WAIT:
                    run(0, (), self.wait, chunk, direction)
                    continue
                variant = self.variant(chunk, direction, microbatch)
                passes.append((chunk, direction, microbatch, variant))
                run(microbatch, (), kinds[direction], chunk, *variant)
            for chunk, direction, microbatch, variant in passes:  # variants send different values
                run(microbatch, variant, self.send, chunk, direction)
        run(self.degrees.microbatches - 1, (), self.finish)
        rows, microbatches = zip(*order)
        microbatch = np.repeat(microbatches, [len(part) for part in rows])
        return Step(self.degrees, self.ops, np.concatenate(rows), microbatch, self.slots, tuple(self.groups))
