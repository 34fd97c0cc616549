"""Batch k as a pure function of (seed, k): nothing to save, restore or reshard.

Row i of step k is sample k * batch + i of an endless sequence; epoch e of it visits all rows of the file
(`mstrain.data.packing`) once, in an order that depends on (seed, e). Hosts ask for their own rows: the number of hosts
changes who reads a row, never what the row is.
"""

import functools

import numpy as np

from mstrain.data.batch import Batch
from mstrain.data.packing import Rows
from mstrain.data.permutation import CHUNK, in_chunks, permute
from mstrain.data.token_file import TokenFile


class Batches:
    """All batches of one token file.

    `seq` is tokens per sequence, `batch` sequences per step of the whole job, `pack` how documents share a sequence.
    `shuffle=False` keeps file order. A fixed validation set is `batch(0) ... batch(n - 1)` of a fixed seed: these never
    change. Raises ValueError when a size is not positive, the seed negative or the file shorter than one window.
    """

    def __init__(
        self, file: TokenFile, seq: int, batch: int, seed: int = 0, shuffle: bool = True, pack: str = "concat"
    ):
        for name, value, least in (("seq", seq, 1), ("batch", batch, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name}={value} is too small: type {name}={least} or more")
        if file.num_tokens < seq + 1 and pack == "concat":
            raise ValueError(
                f"{file.path} has {file.num_tokens} tokens, fewer than one window of seq={seq} and its last "
                f"target: type seq={max(file.num_tokens - 1, 1)} or less, or give more text"
            )
        self.file, self.seq, self.batch_size, self.seed, self.shuffle = file, seq, batch, seed, shuffle
        self._rows = Rows(file, seq, pack)
        self.num_windows, self.parts = self._rows.count, self._rows.parts
        self._chunk = functools.lru_cache(maxsize=64)(self._order)

    @property
    def origin(self) -> str:
        """The token files, for messages."""
        return str(self.file.path)

    @property
    def batches_per_epoch(self) -> int:
        """Steps that together repeat no window; 1 when even the first batch must repeat some."""
        return max(1, self.num_windows // self.batch_size)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """The batch of step `step` (from 0), tokens [rows, seq+1]; only the bytes of these rows are read.

        `rows` selects from range(batch) by slice or index array.
        Raises DamagedTokens when the file holds a token id outside its vocabulary, or has changed since it was opened.
        """
        assert step >= 0
        return self.samples(step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows])

    def samples(self, numbers: np.ndarray) -> Batch:
        """The samples of these numbers (int64, from 0)."""
        return self._rows.read(in_chunks(numbers, self._chunk))

    def _order(self, chunk: int) -> np.ndarray:
        """Row numbers of the samples of one chunk."""
        epochs, windows = np.divmod(chunk * CHUNK + np.arange(CHUNK, dtype=np.int64), self.num_windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                windows[here] = permute(windows[here], self.num_windows, self.seed, int(epoch))
        return windows
