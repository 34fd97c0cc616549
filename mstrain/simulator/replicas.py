"""Makes a program from the operations of one tensor-parallel rank of one data-parallel replica."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mstrain.simulator.placement import GROUP, SEND, STAGES, Degrees, Placement
from mstrain.simulator.program import Program, Ragged, distinct
from mstrain.simulator.slots import RankOp, Slots


@dataclass(frozen=True, eq=False)
class Step:
    """The training step of one rank, which represents all ranks because their devices and links are equal.

    Attributes:
      ops: the distinct operations; `row` (int array of shape (operations,)) lists them in program order.
      microbatch: int array of shape (operations,).
      slots: the values.
      groups: devices of operations along GROUP; the `peer` of such an operation is an index into this list.
    """

    degrees: Degrees
    ops: Sequence[RankOp]
    row: np.ndarray
    microbatch: np.ndarray
    slots: Slots
    groups: Sequence[Sequence[int]] = ()

    def program(self, placement: Placement) -> Program:
        """The program of the first rank of the first replica; `copies` counts the operations of all ranks."""
        spec, specs = distinct([op.spec for op in self.ops])
        place, places = distinct([(op.axis, op.stage, op.peer) for op in self.ops])
        label, labels = distinct([op.label for op in self.ops])
        groups = [self._devices(placement, *where) for where in places]
        ranks = self.degrees.data * self.degrees.tensor
        copies = np.array([1 if axis == GROUP else ranks // len(self.degrees.members(axis)) for axis, *_ in places])
        nbytes, stage, resident, category = self.slots.table(self.degrees.microbatches)
        stages = placement.worker(0, 0, np.arange(self.degrees.pipeline)).tolist()
        return Program(
            specs=specs,
            groups=tuple(groups),
            spec=spec[self.row],
            group=place[self.row],
            microbatch=self.microbatch,
            copies=copies[place[self.row]],
            inputs=self._values([op.inputs for op in self.ops]),
            outputs=self._values([op.outputs for op in self.ops]),
            value_bytes=nbytes,
            resident=resident,
            category=category,
            value_device=placement.worker(0, 0, stage),
            devices=tuple(sorted({*stages, *(device for members in self.groups for device in members)})),
            labels=labels,
            label=label[self.row] if any(labels) else None,
        )

    def _devices(self, placement: Placement, axis: int, stage: int, peer: int) -> Sequence[int]:
        """The devices of an operation."""
        if axis == GROUP:
            return self.groups[peer]
        replica, rank = np.divmod(self.degrees.members(axis), self.degrees.tensor)
        stages = {SEND: [stage, peer], STAGES: range(self.degrees.pipeline)}.get(axis, stage)
        return tuple(np.atleast_1d(placement.worker(replica, rank, np.array(stages))).tolist())

    def _values(self, slots: Sequence[Sequence[int]]) -> Ragged:
        """Value numbers per operation."""
        lists = Ragged.of(slots).take(self.row)
        return Ragged(lists.offsets, self.slots.numbers(lists.items, self.microbatch[lists.owner()]))
