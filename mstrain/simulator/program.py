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
      category: int array of shape (values,), an index into `CATEGORIES`; None if unknown.
      resident: bool array of shape (values,): an input of the program, in memory from the start and never
        freed.
      labels: distinct names of parts of the model; `label` (int array of shape (ops,)) indexes them, None
        if there are none.
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
