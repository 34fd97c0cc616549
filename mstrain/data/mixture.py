"""Several corpora with weights as one: 4096 samples hold each in proportion (weights are rounded to 1/4096), in an
order that the seed chooses."""

import functools
from collections.abc import Sequence

import numpy as np

from mstrain.data.batch import Batch, join
from mstrain.data.batches import Batches
from mstrain.data.permutation import CHUNK, in_chunks, permute


class MixedTokens:
    """What is known of several token files together; `weights` add up to 1."""

    def __init__(self, files: Sequence, weights: Sequence[float]):
        self.files, self.weights = list(files), list(weights)
        self.path, self.vocab_size = files[0].path, max(file.vocab_size for file in files)
        self.num_tokens = sum(file.num_tokens for file in files)
        self.num_documents = sum(file.num_documents for file in files)

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        """A loss in bits per byte of text in the proportions of the mixture; None when a part has no text."""
        of_one = [file.bits_per_byte(1.0) for file in self.files]
        if any(value is None for value in of_one):
            return None
        return nats_per_token / sum(weight / value for weight, value in zip(self.weights, of_one, strict=True) if value)


class MixedBatches:
    """Batches whose sequences come from several files in proportion; a pure function of (seed, k), as `Batches`."""

    def __init__(self, parts: Sequence[Batches], weights: Sequence[float], seed: int):
        first = parts[0]
        self._parts, self.seq, self.batch_size = list(parts), first.seq, first.batch_size
        self.seed = seed
        wanted = np.array(weights) * CHUNK
        counts = np.maximum(np.floor(wanted).astype(int), 1)
        counts[np.argsort(counts - wanted)[: max(CHUNK - counts.sum(), 0)]] += 1  # the largest remainders
        counts[np.argmax(counts)] -= counts.sum() - CHUNK
        self._counts = counts
        self._first = np.cumsum(counts) - counts
        self._choice = np.repeat(np.arange(len(counts)), counts)
        self._period = functools.lru_cache(maxsize=64)(self._order)
        self.parts = Batch(*(next((x for x in options if x), None) for options in zip(*(b.parts for b in parts))))

    @property
    def origin(self) -> str:
        """The token files, for messages."""
        return " and ".join(part.origin for part in self._parts)

    @property
    def batches_per_epoch(self) -> int:
        """Steps that together repeat no window of any part; at least 1."""
        per_sample = self._counts / CHUNK
        samples = min(part.num_windows / share for part, share in zip(self._parts, per_sample, strict=True))
        return max(1, int(samples) // self.batch_size)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """As `Batches.batch`."""
        numbers = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows]
        places = in_chunks(numbers, self._period)
        chosen = self._choice[places]
        samples = numbers // CHUNK * self._counts[chosen] + places - self._first[chosen]
        found = []
        for i in set(chosen.tolist()):
            here = chosen == i
            found.append((here, self._parts[i].samples(samples[here])))
        return join(found, len(numbers), self.parts)

    def _order(self, period: int) -> np.ndarray:
        """The places of the samples of one period among those of its parts, one part after the other."""
        return permute(np.arange(CHUNK, dtype=np.int64), CHUNK, self.seed, period)
