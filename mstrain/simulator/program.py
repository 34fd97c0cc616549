"""A program of operations over devices, as flat arrays (after the IR of DistIR, microsoft/dist-ir).

A program lists the operations of all devices in one order. An operation is an `OpSpec` (kind, operand shapes, element
size) on a group of devices: one device for compute, several for communication. A value is stored on one device.
Distinct specs and groups are stored once, so that the cost of each pair is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

COMMUNICATION = frozenset(
    {"Send", "Scatter", "Broadcast", "Gather", "Reduce", "AllReduce", "AllGather", "ReduceScatter"}
)
# Categories of values, in the order in which reports list their memory.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace")


class OpSpec(NamedTuple):
    """The kind of an operation, the operand shapes that determine its cost, and the bytes per element."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    element_bytes: int

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATION

    @property
    def known_seconds(self) -> float | None:
        """Seconds of an operation made by `timed`; None for others."""
        return None if self.element_bytes else 1e-9 * self.shapes[0][0]


def timed(kind: str, seconds: float) -> OpSpec:
    """An operation of a given time. It is stored as a shape of that many nanoseconds, with elements of 0 bytes."""
    return OpSpec(kind, ((round(1e9 * seconds),),), 0)


class Ragged(NamedTuple):
    """Lists of integers of varying length: list i is `items[offsets[i]:offsets[i + 1]]`."""

    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "Ragged":
        offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists], dtype=np.int64)])
        return cls(offsets, np.fromiter(chain.from_iterable(lists), np.int64, int(offsets[-1])))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Ragged":
        """The lists at `rows`, in that order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Ragged(offsets, self.items[positions])

    def owner(self) -> np.ndarray:
        """For each of `items`, the number of its list."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)


def distinct(items: Sequence) -> tuple[np.ndarray, tuple]:
    """The number of each item's value, and the distinct values in order of appearance."""
    numbers: dict = {}
    return np.array([numbers.setdefault(item, len(numbers)) for item in items], np.int64), tuple(numbers)


@dataclass(frozen=True, eq=False)
class Program:
    """Operations in program order.

    Attributes:
      specs, groups: distinct specs and device groups; `spec` and `group` (int arrays of shape (ops,)) index them.
      microbatch: int array of shape (ops,), -1 for an operation that belongs to no microbatch.
      copies: int array of shape (ops,): the number of operations of the job that each one represents.
      inputs, outputs: the values that each operation reads and writes.
      value_bytes, value_device: int arrays of shape (values,).
      resident: bool array of shape (values,): a program input, in memory from the start and never freed.
      devices: the devices that are simulated. A group may contain others, which affect only its cost.
      category: int array of shape (values,), an index into `CATEGORIES`; None if unknown.
      labels: distinct names of parts of the model; `label` (int array of shape (ops,)) indexes them and is None if the
        operations have no labels.
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
        """Number of operations on all devices of the job."""
        return int(self.copies.sum())
