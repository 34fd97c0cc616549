"""A corpus larger than the disk: a window of its files is tokenized and kept at a time.

Epoch e visits all files in an order that depends on (seed, e), `window` of them at a time, and all rows of a window in
an order that depends on (seed, e, window). Batch k is a pure function of (seed, k). It needs the numbers of rows of the
earlier windows, which are remembered beside the tokens; where they are not known, the windows are tokenized again.
"""

import contextlib
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from mstrain.data.batch import Batch, join
from mstrain.data.batches import Batches
from mstrain.data.documents import text_digest
from mstrain.data.permutation import permute
from mstrain.data.verification import remove_folder
from mstrain.json_files import replace_text

_KEPT = 1  # windows kept before the one in use, for hosts that share the cache and are behind


class Stream:
    """Training files in windows; `make` returns the corpus of some of them, from the cache or made now."""

    def __init__(self, names: tuple[str, ...], window: int, digest: str, cache: Path, make: Callable[..., Any]):
        self.names, self.window, self.digest, self.cache, self._make = names, window, digest, cache, make
        self.windows_per_epoch = math.ceil(len(names) / window)

    def corpus(self, seed: int, number: int) -> Any:
        """The corpus of window `number`, counted over all epochs."""
        epoch, place = divmod(number, self.windows_per_epoch)
        order = permute(np.arange(len(self.names)), len(self.names), seed, epoch)
        chosen = order[place * self.window : (place + 1) * self.window]
        return self._make(tuple(self.names[index] for index in sorted(chosen)))


class StreamedBatches:
    """Batches of a Stream, as `Batches`; the next window is tokenized in the background."""

    def __init__(self, stream: Stream, seq: int, batch: int, seed: int, pack: str):
        self.seq, self.batch_size = seq, batch
        self._stream, self.seed, self._pack = stream, seed, pack
        name = text_digest(stream.digest, f"{stream.window} {seq} {seed} {pack}")
        self._place = stream.cache / "streams" / f"{name}.json"
        self._rows: list[int] = _read(self._place)
        self._open: dict[int, tuple[Any, Batches]] = {}
        self._next: dict[int, Future] = {}
        self.parts = self._batches(0).parts

    @property
    def origin(self) -> str:
        """The token files, for messages."""
        return f"windows of {self._stream.window} files in {self._stream.cache}"

    @property
    def batches_per_epoch(self) -> int:
        """Of the first window."""
        return self._batches(0).batches_per_epoch

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """As `Batches.batch`."""
        samples = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows]
        found, number, first = [], 0, 0
        last = int(samples.max(initial=-1))
        while first <= last:
            count = self._count(number)
            here = (samples >= first) & (samples < first + count)
            if here.any():
                found.append((here, self._batches(number).samples(samples[here] - first)))
            first, number = first + count, number + 1
        if found:
            self._drop(number - 1)
            self._prefetch(number)
        return join(found, len(samples), self.parts)

    def _count(self, number: int) -> int:
        """Rows of a window; remembered for all that were ever open."""
        if number == len(self._rows):
            self._rows.append(self._batches(number).num_windows)
            _write(self._place, self._rows)
            self._drop(number)
        return self._rows[number]

    def _batches(self, number: int) -> Batches:
        if number not in self._open:
            future = self._next.pop(number, None)
            self._open[number] = future.result() if future else self._make(number)
        return self._open[number][1]

    def _make(self, number: int) -> tuple[Any, Batches]:
        corpus = self._stream.corpus(self.seed, number)
        corpus.verification.wait()
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        return corpus, corpus.batches("train", self.seq, self.batch_size, seed, self._pack)

    def _prefetch(self, number: int) -> None:
        """Makes a window in a thread that does not keep the process from ending."""
        if number in self._open or number in self._next:
            return
        made = self._next[number] = Future()

        def make() -> None:
            try:
                made.set_result(self._make(number))
            except BaseException as error:  # raised where the window is used
                made.set_exception(error)

        threading.Thread(target=make, name="next window", daemon=True).start()

    def _drop(self, number: int) -> None:
        """Removes the tokens of the windows before `number`."""
        kept = {self._open[n][0].directory for n in self._open if n >= number - _KEPT}
        for old in [n for n in self._open if n < number - _KEPT]:
            corpus, _ = self._open.pop(old)
            if corpus.directory not in kept:
                remove_folder(corpus.directory, (corpus.train, corpus.validation))


def _read(place: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        rows = json.loads(place.read_text())
        if isinstance(rows, list) and all(type(count) is int and count > 0 for count in rows):
            return rows
    return []


def _write(place: Path, rows: list[int]) -> None:
    """Best effort: what is not remembered is counted again."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_text(place, json.dumps(rows))
