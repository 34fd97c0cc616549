"""Corpus -> token file -> batch(step).

`prepare` makes or finds the token files of a `DataConfig`; `Batches` turns one of them into batches that are
a pure function of (seed, step); the unigram functions compute a baseline for trained models.
"""

from mstrain.data.batch import CONCATENATED, Batch
from mstrain.data.batches import Batches
from mstrain.data.config import PACKS, SOURCES, DataConfig
from mstrain.data.corpus import Corpus, prepare
from mstrain.data.in_order import InOrder
from mstrain.data.mixture import MixedBatches
from mstrain.data.stream import StreamedBatches
from mstrain.data.token_file import TokenFile
from mstrain.data.unigram import unigram_bits_per_byte, unigram_nats_per_token
from mstrain.data.writing import Progress

TrainBatches = Batches | MixedBatches | StreamedBatches
"""Shuffled batches of one token file, of several with weights, or of a window of a larger corpus."""
AnyBatches = TrainBatches | InOrder
"""Batches to train on, or all rows of a file in order."""

__all__ = [
    "CONCATENATED",
    "PACKS",
    "SOURCES",
    "AnyBatches",
    "Batch",
    "Batches",
    "Corpus",
    "DataConfig",
    "Progress",
    "TokenFile",
    "TrainBatches",
    "prepare",
    "unigram_bits_per_byte",
    "unigram_nats_per_token",
]
