"""Programs written by hand, one operation at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstrain.simulator.program import CATEGORIES, OpSpec, Program, Ragged


class ProgramBuilder:
    """Builds a program of a test one operation at a time; values are integers."""

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

    def input(self, shape: Sequence[int], device: int, nbytes: int | None = None, category: str | None = None) -> int:
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
        """As `op`, with the category of the outputs, the microbatch, and the part of the model (`label`)."""
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
