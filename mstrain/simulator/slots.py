"""The operations and values of one tensor rank of one data replica."""

from typing import NamedTuple

import numpy as np

from mstrain.simulator.program import CATEGORIES, OpSpec


class RankOp(NamedTuple):
    """One operation of one rank.

    Attributes:
      axis: the devices that take part, such as TENSOR (`mstrain.simulator.placement`).
      stage: its pipeline stage.
      inputs, outputs: slots of the values that it reads and writes.
      peer: the stage that receives a Send; for operations along GROUP, the number of the group.
      label: words and numbers that name its part of the model; empty if unknown.
    """

    spec: OpSpec
    axis: int
    stage: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    peer: int = -1
    label: tuple = ()


class Slots:
    """Numbers the values of one rank: negative for one value of the step, from 0 for one value per microbatch."""

    _PREVIOUS = 1 << 40

    def __init__(self):
        # (bytes, stage, whether it is a program input, whether it grows with the microbatch, category)
        self.single: list[tuple[int, int, bool, bool, int]] = []
        self.repeated: list[tuple[int, int, bool, bool, int]] = []

    def resident(self, nbytes: int, stage: int, category: str = "parameters") -> int:
        """A program input that all microbatches share, such as a weight."""
        return self.once(nbytes, stage, category, resident=True)

    def once(self, nbytes: int, stage: int, category: str, resident: bool = False) -> int:
        """A value that exists once per step."""
        self.single.append((nbytes, stage, resident, False, CATEGORIES.index(category)))
        return -len(self.single)

    def value(
        self, nbytes: int, stage: int, resident: bool = False, grows: bool = False, category: str = "activations"
    ) -> int:
        """A value per microbatch. `resident`: a program input. `grows`: that of microbatch m has (m + 1) x `nbytes`."""
        self.repeated.append((nbytes, stage, resident, grows, CATEGORIES.index(category)))
        return len(self.repeated) - 1

    @classmethod
    def previous(cls, slot: int) -> int:
        """The slot of the same value of the previous microbatch."""
        return slot + cls._PREVIOUS

    def numbers(self, slots: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
        """Value numbers of `slots` in `microbatch` (int arrays of the same shape)."""
        before, slot = np.divmod(slots, self._PREVIOUS)
        at = len(self.single) + (microbatch - before) * len(self.repeated) + slot
        return np.where(slots < 0, -slots - 1, at)

    def table(self, microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Bytes, stage, residency and category (an index into `CATEGORIES`) of every value number."""
        single, repeated = (np.array(rows, np.int64).reshape(-1, 5) for rows in (self.single, self.repeated))
        rows = np.concatenate([single, np.tile(repeated, (microbatches, 1))])
        microbatch = np.repeat(np.arange(microbatches), len(repeated))
        rows[len(single) :, 0] *= np.where(rows[len(single) :, 3], microbatch + 1, 1)
        return rows[:, 0], rows[:, 1], rows[:, 2] > 0, rows[:, 4]
