"""What one tensor rank of one data replica does: its operations, and its values by slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstrain.simulator.program import CATEGORIES, OpSpec


class RankOp(NamedTuple):
    """One operation of one rank: what it does, along which axis, on which stage (a Send: to stage `peer`).

    `label` names the part of the model it belongs to, in words and numbers; nothing where it does not matter.
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
        self.single: list[tuple[int, int, bool, int]] = []
        self.repeated: list[tuple[int, int, bool, bool, int]] = []

    def resident(self, nbytes: int, stage: int, category: str = "parameters") -> int:
        """A program input that exists once, such as a weight."""
        self.single.append((nbytes, stage, True, CATEGORIES.index(category)))
        return -len(self.single)

    def once(self, nbytes: int, stage: int, category: str) -> int:
        """A value that one operation writes for all microbatches."""
        self.single.append((nbytes, stage, False, CATEGORIES.index(category)))
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
        before = slots >= self._PREVIOUS
        repeated = slots - before * self._PREVIOUS
        at = len(self.single) + (microbatch - before) * len(self.repeated) + repeated
        return np.where(slots < 0, -slots - 1, at)

    def table(self, microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Bytes, stage, residency and category (an index into `CATEGORIES`) of every value number."""
        single = np.array(self.single, np.int64).reshape(-1, 4)
        repeated = np.array(self.repeated, np.int64).reshape(-1, 5)
        times = np.where(repeated[:, 3] > 0, np.arange(1, microbatches + 1)[:, None], 1)
        nbytes = np.concatenate([single[:, 0], (repeated[:, 0] * times).ravel()])
        stage = np.concatenate([single[:, 1], np.tile(repeated[:, 1], microbatches)])
        resident = np.concatenate([single[:, 2] > 0, np.tile(repeated[:, 2] > 0, microbatches)])
        category = np.concatenate([single[:, 3], np.tile(repeated[:, 4], microbatches)])
        return nbytes, stage, resident, category
