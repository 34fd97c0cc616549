"""From the operations of one tensor rank of one data replica to the program of all devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mstrain.simulator.placement import GROUP, SEND, Degrees, Placement
from mstrain.simulator.program import Program, Ragged, distinct
from mstrain.simulator.slots import RankOp, Slots


@dataclass(frozen=True, eq=False)
class Step:
    """One training step of one rank.

    Attributes:
      ops: the distinct operations; `row` (int array of shape (operations,)) lists them in program order.
      microbatch: int array of shape (operations,).
      groups: the devices of the operations along GROUP, whose `peer` numbers them.
    """

    degrees: Degrees
    ops: Sequence[RankOp]
    row: np.ndarray
    microbatch: np.ndarray
    slots: Slots
    groups: Sequence[Sequence[int]] = ()

    def representative(self, placement: Placement) -> Program:
        """The program of one rank, exact where all are alike; `copies` counts the operations of the others."""
        return self._program(placement, replace(self.degrees, data=1, tensor=1, cols=1))

    def expand(self, placement: Placement) -> Program:
        return self._program(placement, self.degrees)

    def _program(self, placement: Placement, degrees: Degrees) -> Program:
        members, whole = degrees.rank_groups(), self.degrees.rank_groups()
        number, counts = np.array([len(groups) for groups in members]), np.array([len(groups) for groups in whole])
        axes = np.array([op.axis for op in self.ops], np.int64)
        copies = number[axes[self.row]]
        op = np.repeat(self.row, copies)
        at = np.repeat(np.arange(len(self.row)), copies)
        copy = np.arange(len(op)) - np.repeat(np.cumsum(copies) - copies, copies)
        where, places = distinct([(op.axis, op.stage, op.peer) for op in self.ops])
        code, group = np.unique(where[op] * number.max() + copy, return_inverse=True)
        groups = tuple(
            self._devices(placement, whole, places[place], its_copy)
            for place, its_copy in zip(*(part.tolist() for part in np.divmod(code, number.max())))
        )
        spec, specs = distinct([op.spec for op in self.ops])
        label, labels = distinct([op.label for op in self.ops])
        ranks = degrees.data * degrees.tensor
        nbytes, stage, resident, category = self.slots.table(degrees.microbatches)
        every = np.divmod(np.arange(ranks), degrees.tensor)
        devices = placement.worker(*every, np.arange(degrees.pipeline)[:, None]).ravel().tolist()
        return Program(
            specs=specs,
            groups=groups,
            spec=spec[op],
            group=group,
            microbatch=self.microbatch[at],
            copies=(counts // number)[axes[op]],
            inputs=self._values([op.inputs for op in self.ops], op, at, copy, members),
            outputs=self._values([op.outputs for op in self.ops], op, at, copy, members),
            value_bytes=np.repeat(nbytes, ranks),
            resident=np.repeat(resident, ranks),
            category=np.repeat(category, ranks),
            value_device=placement.worker(*every, stage[:, None]).ravel(),
            devices=tuple(sorted({*devices, *(device for members in self.groups for device in members)})),
            labels=labels,
            label=label[op] if any(labels) else None,
        )

    def _devices(self, placement: Placement, whole, where: tuple[int, int, int], copy: int) -> Sequence[int]:
        """The devices of one operation; `where` is its axis, stage and peer."""
        axis, stage, peer = where
        if axis == GROUP:
            return self.groups[peer]
        replica, rank = np.divmod(whole[axis][copy], self.degrees.tensor)
        stages = np.array([stage, peer]) if axis == SEND else stage
        return tuple(np.atleast_1d(placement.worker(replica, rank, stages)).tolist())

    def _values(self, slots: Sequence[Sequence[int]], op, at, copy, members: list[np.ndarray]) -> Ragged:
        """Value numbers per operation: a collective touches the value of every member, the rest that of their own."""
        lists = Ragged.of(slots).take(op)
        owner = lists.owner()
        items = self.slots.numbers(lists.items, self.microbatch[at][owner])
        ranks = members[0].size
        if ranks == 1:
            return Ragged(lists.offsets, items)
        axis = np.array([op.axis for op in self.ops])[op]
        width, size = (np.array([part(groups) for groups in members]) for part in (lambda g: g.shape[1], np.size))
        times = width[axis[owner]]
        items, owner = np.repeat(items, times), np.repeat(owner, times)
        member = np.arange(len(items)) - np.repeat(np.cumsum(times) - times, times)
        first = (np.cumsum(size) - size)[axis] + copy * width[axis]
        rank = np.concatenate([groups.ravel() for groups in members])[first[owner] + member]
        return Ragged(np.concatenate([[0], np.cumsum(lists.lengths * width[axis])]), items * ranks + rank)
