"""The loss on all of a token file, in total and of every document, on the mesh of the model."""

import dataclasses
import math
from typing import Any

import numpy as np

from mstrain.data.in_order import InOrder
from mstrain.data.tokenizers import Tokenizer
from mstrain.models.transformer import Transformer
from mstrain.program.inference import row_losses_program
from mstrain.training.feed import Feed


@dataclasses.dataclass(frozen=True)
class Measured:
    """Loss of some text: `nats` in total over `targets` tokens; `text_bytes` is None where it is not known."""

    nats: float
    targets: int
    text_bytes: float | None = None

    @property
    def loss(self) -> float:
        """Nats per token; 0 without targets."""
        return self.nats / max(self.targets, 1)

    @property
    def perplexity(self) -> float:
        """Infinite where it is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_json(self) -> dict[str, Any]:
        found = {"tokens": self.targets, "loss": self.loss, "perplexity": self.perplexity}
        return found | {"bits_per_byte": self.bits_per_byte, "nats": self.nats}


def measure(module: Transformer, params, rows: InOrder, accumulate: int) -> tuple[np.ndarray, np.ndarray]:
    """(nats, targets) of every row of a file, float64; all processes call it together and get all rows."""
    feed = Feed(rows, module.plan.mesh, accumulate)
    program = row_losses_program(module, feed.abstract).compile()
    found, running = [], None
    for number in range(rows.batches_per_epoch):
        following = program(params, feed(number))
        if running:
            found.append(_fetched(running))  # the next batch runs meanwhile
        running = following
    found.append(_fetched(running))
    nats, targets = (np.concatenate(parts)[: rows.num_rows] for parts in zip(*found, strict=True))
    return nats, targets


def of_file(file: Any, nats: np.ndarray, targets: np.ndarray) -> Measured:
    """All rows of a file together. Tokens that are not predicted, such as the first one, count with the mean loss in
    bits per byte."""
    total, count = float(nats.sum()), int(targets.sum())
    per_byte = file.bits_per_byte(total / max(count, 1))
    return Measured(total, count, total / math.log(2) / per_byte if per_byte else None)


def of_documents(rows: InOrder, nats, targets, tokenizer: Tokenizer | None) -> list[Measured]:
    """Every document of a file whose rows have pack=none."""
    bounds, owners = rows.documents()
    count = len(bounds) - 1
    sums = (np.bincount(owners, weights, count) for weights in (nats, targets))
    found = []
    for number, (total, each) in enumerate(zip(*sums, strict=True)):
        size = None
        if tokenizer is not None and not rows.file.marks:
            size = len(tokenizer.decode(rows.file.read(*bounds[number : number + 2].tolist())).encode())
        found.append(Measured(float(total), int(each), size))
    return found


def _fetched(sums) -> list[np.ndarray]:
    return [np.asarray(x.addressable_data(0), np.float64).reshape(-1) for x in sums]
