"""From what one tensor rank of one data replica does to the program of all devices.

A transform describes a training step once, for one rank of one replica: a list of operations per task (chunk,
direction, microbatch), with values numbered by slot. `Layout` puts the tasks into the order of a schedule;
`Step.representative` makes a program that keeps time for one rank only (exact when all are alike),
`Step.expand` one for every device. Everything after the description is array arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mstrain.simulator.placement import Degrees, Placement
from mstrain.simulator.program import OpSpec, Program, Ragged, number_present
from mstrain.simulator.slots import RankOp, Slots


@dataclass(frozen=True, eq=False)
class Step:
    """One training step of one rank, laid out in order; see `Program` for the arrays."""

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
    labels: tuple[tuple, ...] = ()
    label: np.ndarray | None = None

    def representative(self, placement: Placement) -> Program:
        """The program of one rank, exact where all are alike."""
        return self._program(placement, 1, 1)

    @property
    def alike(self) -> bool:
        """Whether one rank may represent all."""
        return True

    def expand(self, placement: Placement) -> Program:
        """The program of all devices."""
        return self._program(placement, self.degrees.data, self.degrees.tensor)

    def _program(self, placement: Placement, data: int, tensor: int) -> Program:
        """The program of `data` replicas of `tensor` ranks; `copies` counts the operations of the others."""
        ranks = data * tensor
        cols = self.degrees.cols if tensor > 1 else 1
        mesh = _Mesh(data, tensor, tensor // cols, cols)
        axis_copies = mesh.copies
        copies = axis_copies[self.axis]
        rows = np.repeat(np.arange(len(self.spec)), copies)
        copy = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        axis = self.axis[rows]
        replica, rank = mesh.first_rank(axis, copy)
        groups, group = self._groups(placement, axis, replica, rank, rows)
        whole = _Mesh(self.degrees.data, self.degrees.tensor, self.degrees.rows, self.degrees.cols).copies
        nbytes, stage, resident, category = self.slots.table(self.degrees.microbatches)
        every, stages = np.arange(ranks), np.arange(self.degrees.pipeline)
        return Program(
            specs=self.specs,
            groups=groups,
            spec=self.spec[rows],
            group=group,
            microbatch=self.microbatch[rows],
            copies=(whole // axis_copies)[axis],
            inputs=_spread(self.inputs, rows, axis, copy, mesh),
            outputs=_spread(self.outputs, rows, axis, copy, mesh),
            value_bytes=np.repeat(nbytes, ranks),
            resident=np.repeat(resident, ranks),
            category=np.repeat(category, ranks),
            value_device=placement.worker(every // tensor, every % tensor, stage[:, None]).ravel(),
            devices=tuple(placement.worker(every // tensor, every % tensor, stages[:, None]).ravel().tolist()),
            labels=self.labels,
            label=None if self.label is None else self.label[rows],
        )

    def _groups(self, placement, axis, replica, rank, rows) -> tuple[tuple[Sequence[int], ...], np.ndarray]:
        stages, tensor = self.degrees.pipeline, self.degrees.tensor
        peers = int(self.peer.max(initial=-1)) + 2
        pair, pairs = number_present(self.stage * peers + self.peer + 1, stages * peers)
        code = ((axis * (replica.max(initial=0) + 1) + replica) * tensor + rank) * len(pairs) + pair[rows]
        group, codes = number_present(code, int(code.max(initial=-1)) + 1)
        groups = []
        for number in codes.tolist():
            number, its_pair = divmod(number, len(pairs))
            its_stage, its_peer = divmod(int(pairs[its_pair]), peers)
            number, its_rank = divmod(number, tensor)
            its_axis, its_replica = divmod(number, int(replica.max(initial=0)) + 1)
            groups.append(placement.group(its_axis, its_replica, its_rank, its_stage, its_peer - 1))
        return tuple(groups), group


@dataclass(frozen=True)
class _Mesh:
    """Which groups each axis of an operation has among `data` replicas of rows x cols tensor ranks.

    `copies`: groups per axis; `width`: ranks per group. Groups of tensor ranks are numbered by replica,
    those of data replicas by rank, those along ROW and COL by replica and then by column or row.
    GROUP needs a single rank and replica.
    """

    data: int
    tensor: int
    rows: int
    cols: int

    @property
    def copies(self) -> np.ndarray:
        ranks = self.data * self.tensor
        return np.array([ranks, self.data, self.tensor, ranks, self.data * self.cols, self.data * self.rows, 1])

    @property
    def width(self) -> np.ndarray:
        return np.array([1, self.tensor, self.data, 1, self.rows, self.cols, 1])

    def first_rank(self, axis: np.ndarray, copy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(replica, rank) of the first member of group `copy` along `axis`."""
        own, none = copy // self.tensor, 0 * copy
        replica = np.choose(axis, [own, copy, none, own, copy // self.cols, copy // self.rows, none])
        rank = copy % self.tensor
        column, row = copy % self.cols, copy % self.rows * self.cols
        return replica, np.choose(axis, [rank, none, copy, rank, column, row, none])

    def member(self, axis: np.ndarray, copy: np.ndarray, member: np.ndarray) -> np.ndarray:
        """Number (replica by replica) of each member of group `copy` along `axis`."""
        replica, rank = self.first_rank(axis, copy)
        first = replica * self.tensor + rank
        return first + member * np.array([0, 1, self.tensor, 0, self.cols, 1, 0])[axis]


def _spread(lists: Ragged, rows, axis, copy, mesh: _Mesh) -> Ragged:
    """Value numbers per rank: a collective touches the value of every member, the rest that of their own."""
    ranks, width = mesh.data * mesh.tensor, mesh.width
    if ranks == 1:
        return lists
    lists = lists.take(rows)
    owner = lists.owner()
    times = width[axis[owner]]
    items, owner = np.repeat(lists.items, times), np.repeat(owner, times)
    member = np.arange(len(items)) - np.repeat(np.cumsum(times) - times, times)
    rank = mesh.member(axis[owner], copy[owner], member)
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(lists.lengths * width[axis], out=offsets[1:])
    return Ragged(offsets, items * ranks + rank)


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

    def step(self, degrees: Degrees, slots: Slots) -> Step:
        """Everything added so far, as one step."""
        ops = [op for template in self._templates for op in template]
        numbers: dict[OpSpec, int] = {}
        labels: dict[tuple, int] = {}
        table = np.array([(numbers.setdefault(op.spec, len(numbers)), op.axis, op.stage, op.peer) for op in ops])
        label = np.array([labels.setdefault(op.label, len(labels)) for op in ops])
        begin = np.zeros(len(self._templates) + 1, np.int64)
        np.cumsum([len(template) for template in self._templates], out=begin[1:])
        order = np.array(self._tasks, np.int64)
        rows = Ragged(begin, np.arange(len(ops))).take(order[:, 0])
        microbatch = np.repeat(order[:, 1], rows.lengths)

        def numbered(lists: Ragged) -> Ragged:
            lists = lists.take(rows.items)
            return lists._replace(items=slots.numbers(lists.items, np.repeat(microbatch, lists.lengths)))

        spec, axis, stage, peer = table[rows.items].T
        return Step(
            degrees,
            tuple(numbers),
            spec,
            axis,
            stage,
            peer,
            microbatch,
            numbered(Ragged.of([op.inputs for op in ops])),
            numbered(Ragged.of([op.outputs for op in ops])),
            slots,
            tuple(labels),
            label[rows.items] if any(labels) else None,
        )
