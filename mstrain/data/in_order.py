"""All rows of a token file, each once and in the order of the file, for evaluation."""

import numpy as np

from mstrain.data.batch import Batch
from mstrain.data.packing import Rows, document_starts


class InOrder:
    """Batches as `Batches` has them, until every row is read; the last one is filled up with rows that do not count.

    `pack` is concat, segments or none. Raises ValueError as `Rows`.
    """

    def __init__(self, file, seq: int, batch: int, pack: str):
        self._rows = Rows(file, seq, pack, whole=True)
        self.file, self.seq, self.batch_size, self.num_rows = file, seq, batch, self._rows.count
        self.parts = self._rows.parts

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """The batch number `step`, tokens [rows, seq + 1]; `rows` selects from range(batch)."""
        numbers = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows]
        found = self._rows.read(np.minimum(numbers, self.num_rows - 1))
        return found._replace(mask=found.mask & (numbers < self.num_rows)[:, None])

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(the first token of every document and the end of the file, the number of the document of every row), for
        pack=none."""
        starts = document_starts(self.file)
        return np.append(starts, self.file.num_tokens), np.searchsorted(starts, self._rows.begins, "right") - 1
