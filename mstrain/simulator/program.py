"""A program of operations over devices, as flat arrays (after the IR of DistIR, microsoft/dist-ir).

The program is global: it holds the operations of all devices in one order. An operation is a pair (what,
where): what is an `OpSpec` (kind, operand shapes, element size), where is a group of devices. One device
computes; several devices communicate. Values live on one device each. Distinct specs and groups are stored
once, so that costs are computed once per distinct pair, however long the program is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

COMMUNICATION = frozenset(
    {"Send", "Scatter", "Broadcast", "Gather", "Reduce", "AllReduce", "AllGather", "ReduceScatter"}
)

# What a value is for, in the order in which memory is reported.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace")


class OpSpec(NamedTuple):
    """What an operation does: its kind, the operand shapes that decide its cost, bytes per element."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATION


class Ragged(NamedTuple):
    """Lists of integers of varying length: list i is `items[offsets[i]:offsets[i + 1]]`."""

    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=offsets[1:])
        items = np.fromiter(chain.from_iterable(lists), np.int64, int(offsets[-1]))
        return cls(offsets, items)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        """The lists at `rows`, in that order."""
        lengths = self.lengths[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Ragged(offsets, self.items[positions])

    def owner(self) -> np.ndarray:
        """For each item, the index of the list it belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)


def number_present(codes: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct values of `codes`, ints in [0, bound): each one's number, and the sorted values."""
    present = np.zeros(bound, bool)
    present[codes] = True
    return (np.cumsum(present) - 1)[codes], np.flatnonzero(present)


@dataclass(frozen=True, eq=False)
class Program:
    """Operations in program order.

    Attributes:
      specs, groups: the distinct specs and device groups; `spec` and `group` (int arrays of shape (ops,))
        index them.
      microbatch: int array of shape (ops,), -1 where it does not apply.
      copies: int array of shape (ops,): how many operations of the whole job each one stands for (1 unless
        the program is one representative of symmetric ranks).
      inputs, outputs: values read and written by each operation.
      value_bytes, value_device: int arrays of shape (values,).
      category: int array of shape (values,), an index into `CATEGORIES`; None where nobody has said.
      resident: bool array of shape (values,): an input of the program, in memory from the start and never
        freed.
      labels: distinct names of parts of the model; `label` (int array of shape (ops,)) indexes them, None
        where nobody has named any.
      devices: the devices whose time is kept. A group may name others: they only decide the cost.
    """

    specs: tuple[OpSpec, ...]
    groups: tuple[Sequence[int], ...]
    spec: np.ndarray
    group: np.ndarray
    microbatch: np.ndarray
    copies: np.ndarray
    inputs: Ragged
    outputs: Ragged
    value_bytes: np.ndarray
    value_device: np.ndarray
    resident: np.ndarray
    devices: tuple[int, ...]
    category: np.ndarray | None = None
    labels: tuple[tuple, ...] = ()
    label: np.ndarray | None = None

    @property
    def num_ops(self) -> int:
        """Operations of the whole job (each one counted `copies` times)."""
        return int(self.copies.sum())

    def op_counts(self) -> dict[str, int]:
        """Operations of the whole job by kind."""
        per_spec = np.bincount(self.spec, weights=self.copies, minlength=len(self.specs))
        counts: dict[str, int] = {}
        for spec, count in zip(self.specs, per_spec.astype(np.int64).tolist()):
            counts[spec.kind] = counts.get(spec.kind, 0) + count
        return counts


class ProgramBuilder:
    """Builds a program one operation at a time; values are integers.

    Use it for hand-written programs; regular ones (`replicas.py`) are assembled from arrays.
    """

    def __init__(self, element_bytes: int = 4):
        self.element_bytes = element_bytes
        self._specs: dict[OpSpec, int] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._labels: dict[tuple, int] = {}
        self._ops: list[tuple[int, int, tuple[int, ...], tuple[int, ...], int, int]] = []
        self._values: list[tuple[int, int, bool, int]] = []

    def _value(self, shape: Sequence[int], device: int, resident: bool, category: str | None) -> int:
        nbytes = int(np.prod(shape, dtype=np.int64)) * self.element_bytes
        index = -1 if category is None else CATEGORIES.index(category)
        self._values.append((nbytes, device, resident, index))
        return len(self._values) - 1

    def input(
        self, shape: Sequence[int], device: int, nbytes: int | None = None, category: str | None = None
    ) -> int:
        """A program input of `shape` on `device`; `nbytes` overrides the size (another dtype)."""
        value = self._value(shape, device, True, category)
        if nbytes is not None:
            self._values[value] = (nbytes, *self._values[value][1:])
        return value

    def op(
        self,
        kind: str,
        shapes: Sequence[Sequence[int]],
        devices: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[tuple[Sequence[int], int]] = (),
    ) -> tuple[int, ...]:
        """Append an operation; `outputs` are (shape, device) pairs. Returns the output values."""
        spec = OpSpec(kind, tuple(tuple(shape) for shape in shapes), self.element_bytes)
        return self.add(spec, devices, inputs, outputs)

    def add(
        self,
        spec: OpSpec,
        devices: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[tuple[Sequence[int], int]] = (),
        category: str | None = None,
        microbatch: int = -1,
        label: tuple = (),
    ) -> tuple[int, ...]:
        """As `op`, and what the outputs are for, the microbatch, and the part of the model."""
        results = tuple(self._value(shape, device, False, category) for shape, device in outputs)
        self._ops.append(
            (
                self._specs.setdefault(spec, len(self._specs)),
                self._groups.setdefault(tuple(devices), len(self._groups)),
                tuple(inputs),
                results,
                microbatch,
                self._labels.setdefault(label, len(self._labels)),
            )
        )
        return results

    def build(self) -> Program:
        """The finished program."""
        columns = list(zip(*self._ops)) or [()] * 6
        sizes, devices, resident, category = (
            map(np.array, zip(*self._values)) if self._values else (np.zeros(0, int),) * 4
        )
        count = len(self._ops)
        return Program(
            specs=tuple(self._specs),
            groups=tuple(self._groups),
            spec=np.array(columns[0], np.int64),
            group=np.array(columns[1], np.int64),
            microbatch=np.array(columns[4], np.int64),
            copies=np.ones(count, np.int64),
            inputs=Ragged.of(columns[2]),
            outputs=Ragged.of(columns[3]),
            value_bytes=sizes,
            value_device=devices,
            resident=resident.astype(bool),
            devices=tuple(sorted({d for group in self._groups for d in group})),
            category=None if (category < 0).any() else category,
            labels=tuple(self._labels),
            label=np.array(columns[5], np.int64) if any(self._labels) else None,
        )
