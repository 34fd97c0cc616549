"""The operations and values of one tensor rank of one data replica."""

from typing import NamedTuple

import numpy as np

from mstrain.simulator.program import CATEGORIES, OpSpec


class RankOp(NamedTuple):
    """One operation of one rank: what it does, along which axis, on which stage (a Send: to stage `peer`).

    `label` names the part of the model it belongs to, in words and numbers; empty if unknown.
    """

    spec: OpSpec
    axis: int
    stage: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    peer: int = -1
    label: tuple = ()


class Slots:
    """Numbers the values of one rank: one per program (negative) or one per microbatch (from 0 up)."""

    _PREVIOUS = 1 << 40

    def __init__(self):
        # Bytes, stage, whether they are inputs, whether they grow with the microbatch, category.
        self.single: list[tuple[int, int, bool, bool, int]] = []
        self.repeated: list[tuple[int, int, bool, bool, int]] = []

    def resident(self, nbytes: int, stage: int, category: str = "parameters") -> int:
        """A program input that exists once, such as a weight."""
        return self.once(nbytes, stage, category, resident=True)

    def once(self, nbytes: int, stage: int, category: str, resident: bool = False) -> int:
        """A value that one operation writes for all microbatches."""
        self.single.append((nbytes, stage, resident, False, CATEGORIES.index(category)))
        return -len(self.single)

    def value(
        self, nbytes: int, stage: int, resident: bool = False, grows: bool = False, category: str = "activations"
    ) -> int:
        """A value per microbatch; `resident`: an input; `grows`: microbatch m has m + 1 times `nbytes`."""
        self.repeated.append((nbytes, stage, resident, grows, CATEGORIES.index(category)))
        return len(self.repeated) - 1

    @classmethod
    def previous(cls, slot: int) -> int:
        """The same value of the microbatch before."""
        return slot + cls._PREVIOUS

    def numbers(self, slots: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
        """Value numbers of `slots` as seen from `microbatch` (both int arrays of one shape)."""
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
