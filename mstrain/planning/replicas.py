"""From what one tensor rank of one data replica does to the program of all devices.

A transform describes a training step once, for one rank of one replica: a list of operations per task (chunk,
direction, microbatch), with values numbered by slot. `Layout` puts the tasks into the order of a schedule;
`Step.representative` makes a program that keeps time for one rank only (exact when all are alike), `Step.expand` one
for every device. Everything after the description is array arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mstrain.planning.program import OpSpec, Program, Ragged

LOCAL, TENSOR, DATA, SEND = range(4)


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of a plan; `interleave` is the number of model chunks per pipeline stage."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    interleave: int = 1

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class Placement:
    """Numbers the workers: `order` lists the axes from the outermost to the innermost, `first` is the first number."""

    degrees: Degrees
    order: tuple[str, ...] = ("data", "tensor", "pipeline")
    first: int = 0

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
        if axis == TENSOR:
            return range(here, here + tensor * self.degrees.tensor, tensor)
        if axis == DATA:
            return range(here, here + data * self.degrees.data, data)
        return (here, self.worker(replica, rank, peer)) if axis == SEND else (here,)


class RankOp(NamedTuple):
    """One operation of one rank: what it does, along which axis, on which stage (a Send: to stage `peer`)."""

    spec: OpSpec
    axis: int
    stage: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    peer: int = -1


class Slots:
    """Numbers the values of one rank: one per program (negative) or one per microbatch (from 0 up)."""

    _PREVIOUS = 1 << 40

    def __init__(self):
        self.single: list[tuple[int, int]] = []
        self.repeated: list[tuple[int, int, bool, bool]] = []

    def resident(self, nbytes: int, stage: int) -> int:
        """A program input that exists once, such as a weight."""
        self.single.append((nbytes, stage))
        return -len(self.single)

    def value(self, nbytes: int, stage: int, resident: bool = False, grows: bool = False) -> int:
        """A value per microbatch; `resident`: a program input; `grows`: microbatch m holds m + 1 times `nbytes`."""
        self.repeated.append((nbytes, stage, resident, grows))
        return len(self.repeated) - 1

    @classmethod
    def previous(cls, slot: int) -> int:
        """The same value of the microbatch before."""
        return slot + cls._PREVIOUS

    def numbers(self, slots: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
        """Value numbers of `slots` as seen from `microbatch` (both int arrays of one shape)."""
        before = slots >= self._PREVIOUS
        repeated = slots - before * self._PREVIOUS
        at = len(self.single) + (microbatch - before) * len(self.repeated) + repeated
        return np.where(slots < 0, -slots - 1, at)

    def table(self, microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes, stage and residency of every value number."""
        single = np.array(self.single, np.int64).reshape(-1, 2)
        repeated = np.array(self.repeated, np.int64).reshape(-1, 4)
        times = np.where(repeated[:, 3] > 0, np.arange(1, microbatches + 1)[:, None], 1)
        nbytes = np.concatenate([single[:, 0], (repeated[:, 0] * times).ravel()])
        stage = np.concatenate([single[:, 1], np.tile(repeated[:, 1], microbatches)])
        resident = np.concatenate([np.ones(len(single), bool), np.tile(repeated[:, 2] > 0, microbatches)])
        return nbytes, stage, resident


@dataclass(frozen=True)
class Step:
    """One training step of one rank, laid out in order; see `Program` for the arrays.

    `prologue` is operations on explicit devices that run once, before everything else.
    """

    degrees: Degrees
    specs: tuple[OpSpec, ...]
    spec: np.ndarray
    axis: np.ndarray
    stage: np.ndarray
    peer: np.ndarray
    microbatch: np.ndarray
    inputs: Ragged
    outputs: Ragged
    slots: Slots
    prologue: tuple[tuple[OpSpec, tuple[int, ...]], ...] = ()

    def representative(self, placement: Placement) -> Program:
        """The program of rank 0 of replica 0: exact where all ranks are alike. Raises ValueError with a prologue."""
        if self.prologue:
            raise ValueError("loading from a root device is not alike for all ranks; use expand()")
        return self._program(placement, 1, 1)

    def expand(self, placement: Placement) -> Program:
        """The program of all devices."""
        return self._program(placement, self.degrees.data, self.degrees.tensor)

    def _program(self, placement: Placement, data: int, tensor: int) -> Program:
        """The program of `data` replicas of `tensor` ranks; operations of the others are counted in `copies`."""
        ranks = data * tensor
        axis_copies = np.array([ranks, data, tensor, ranks])
        width = np.array([1, tensor, data, 1])
        copies = axis_copies[self.axis]
        rows = np.repeat(np.arange(len(self.spec)), copies)
        copy = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        axis = self.axis[rows]
        # `copy` numbers the ranks, the replicas (one tensor group each) or the ranks of a replica (data groups).
        replica = np.choose(axis, [copy // tensor, copy, 0 * copy, copy // tensor])
        rank = np.choose(axis, [copy % tensor, 0 * copy, copy, copy % tensor])
        groups, group = self._groups(placement, axis, replica, rank, rows)
        whole = np.array([self.degrees.world // self.degrees.pipeline, self.degrees.data, self.degrees.tensor,
                          self.degrees.world // self.degrees.pipeline])
        nbytes, stage, resident = self.slots.table(self.degrees.microbatches)
        every = np.arange(ranks)
        program = Program(
            specs=self.specs, groups=groups, spec=self.spec[rows], group=group, microbatch=self.microbatch[rows],
            copies=(whole // axis_copies)[axis],
            inputs=_spread(self.inputs.take(rows), axis, copy, width, data, tensor),
            outputs=_spread(self.outputs.take(rows), axis, copy, width, data, tensor),
            value_bytes=np.repeat(nbytes, ranks), resident=np.repeat(resident, ranks),
            value_device=placement.worker(every // tensor, every % tensor, stage[:, None]).ravel(),
            devices=tuple(placement.worker(every // tensor, every % tensor,
                                           np.arange(self.degrees.pipeline)[:, None]).ravel().tolist()))
        return _with_prologue(program, self.prologue) if self.prologue else program

    def _groups(self, placement, axis, replica, rank, rows) -> tuple[tuple[Sequence[int], ...], np.ndarray]:
        peer, stages = self.peer[rows] + 1, self.degrees.pipeline + 1
        code = (((axis * self.degrees.data + replica) * self.degrees.tensor + rank) * stages
                + self.stage[rows]) * stages + peer
        present = np.zeros(4 * self.degrees.data * self.degrees.tensor * stages ** 2, bool)
        present[code] = True
        group = (np.cumsum(present) - 1)[code]
        groups = []
        for number in np.flatnonzero(present).tolist():
            number, its_peer = divmod(number, stages)
            number, its_stage = divmod(number, stages)
            number, its_rank = divmod(number, self.degrees.tensor)
            its_axis, its_replica = divmod(number, self.degrees.data)
            groups.append(placement.group(its_axis, its_replica, its_rank, its_stage, its_peer - 1))
        return tuple(groups), group


def _spread(lists: Ragged, axis, copy, width, data: int, tensor: int) -> Ragged:
    """Value numbers per rank: a collective touches the value of every member, the others that of their own rank."""
    owner = lists.owner()
    times = width[axis[owner]]
    items, owner = np.repeat(lists.items, times), np.repeat(owner, times)
    member = np.arange(len(items)) - np.repeat(np.cumsum(times) - times, times)
    kind, own = axis[owner], copy[owner]
    rank = np.choose(kind, [own, own * tensor + member, member * tensor + own, own])
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(lists.lengths * width[axis], out=offsets[1:])
    return Ragged(offsets, items * (data * tensor) + rank)


def _with_prologue(program: Program, prologue: tuple[tuple[OpSpec, tuple[int, ...]], ...]) -> Program:
    extra = len(prologue)
    specs, groups = program.specs, program.groups

    def empty_first(lists: Ragged) -> Ragged:
        return Ragged(np.concatenate([np.zeros(extra, np.int64), lists.offsets]), lists.items)

    return Program(
        specs=specs + tuple(spec for spec, _ in prologue), groups=groups + tuple(group for _, group in prologue),
        spec=np.concatenate([len(specs) + np.arange(extra), program.spec]),
        group=np.concatenate([len(groups) + np.arange(extra), program.group]),
        microbatch=np.concatenate([np.full(extra, -1), program.microbatch]),
        copies=np.concatenate([np.ones(extra, np.int64), program.copies]),
        inputs=empty_first(program.inputs), outputs=empty_first(program.outputs), value_bytes=program.value_bytes,
        value_device=program.value_device, resident=program.resident,
        devices=tuple(sorted({*program.devices, *(device for _, group in prologue for device in group)})))


class Layout:
    """Collects tasks in program order; the operations of equal keys are written once and repeated."""

    def __init__(self):
        self._templates: list[Sequence[RankOp]] = []
        self._numbers: dict[tuple, int] = {}
        self._tasks: list[tuple[int, int]] = []

    def add(self, key: tuple, microbatch: int, write: Callable[..., Sequence[RankOp]], *args) -> None:
        """Append the task `key` for `microbatch`; `write(*args)` gives its operations the first time."""
        if key not in self._numbers:
            self._numbers[key] = len(self._templates)
            self._templates.append(write(*args))
        self._tasks.append((self._numbers[key], microbatch))

    def step(self, degrees: Degrees, slots: Slots, prologue=()) -> Step:
        """Everything added so far, as one step."""
        ops = [op for template in self._templates for op in template]
        numbers: dict[OpSpec, int] = {}
        table = np.array([(numbers.setdefault(op.spec, len(numbers)), op.axis, op.stage, op.peer) for op in ops])
        begin = np.zeros(len(self._templates) + 1, np.int64)
        np.cumsum([len(template) for template in self._templates], out=begin[1:])
        order = np.array(self._tasks, np.int64)
        rows = Ragged(begin, np.arange(len(ops))).take(order[:, 0])
        microbatch = np.repeat(order[:, 1], rows.lengths)

        def numbered(lists: Ragged) -> Ragged:
            lists = lists.take(rows.items)
            return lists._replace(items=slots.numbers(lists.items, np.repeat(microbatch, lists.lengths)))

        spec, axis, stage, peer = table[rows.items].T
        return Step(degrees, tuple(numbers), spec, axis, stage, peer, microbatch,
                    numbered(Ragged.of([op.inputs for op in ops])), numbered(Ragged.of([op.outputs for op in ops])),
                    slots, tuple(prologue))
