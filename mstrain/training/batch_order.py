"""The batch of each step."""

from collections.abc import Iterable

from mstrain.data import TrainBatches


class BatchOrder:
    """The batch of each step: those of `batches` in order, without `skipped`. `rollbacks` is the number of rollbacks so
    far."""

    def __init__(self, batches: TrainBatches, skipped: Iterable[int] = (), rollbacks: int = 0):
        self.batches, self.skipped, self.rollbacks = batches, sorted(set(skipped)), rollbacks

    def __call__(self, index: int) -> int:
        """The batch of step `index + 1`."""
        for batch in self.skipped:
            index += batch <= index
        return index
