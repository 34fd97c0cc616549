"""The batch of a step."""

from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Sequences of T + 1 tokens, as NumPy or JAX arrays with the same leading dims; a pytree.

    Attributes:
      tokens: int32 [..., T + 1]: inputs are `[..., :-1]`, targets `[..., 1:]`.
      segments: int32 [..., T]: the document of each input, numbered within its sequence; 0 is padding. None: a sequence
        is one document.
      mask: bool [..., T]: whether a target counts in the loss. None: all count.
    """

    tokens: Any
    segments: Any = None
    mask: Any = None


CONCATENATED = Batch("int32")
"""The dtypes of a batch of pack=concat, which has tokens only."""
MASKED = Batch("int32", None, "bool")
PACKED = Batch("int32", "int32", "bool")


def join(found: list[tuple[np.ndarray, Batch]], rows: int, parts: Batch) -> Batch:
    """One batch of `rows` rows from batches of some of them, each with the places (bool [rows]) of its rows.

    Where `parts` has segments or a mask and one of them has not, a row is one document of which every target counts.
    """
    joined = []
    for name, part in zip(Batch._fields, parts, strict=True):
        if part is None:
            joined.append(None)
            continue
        seq = found[0][1].tokens.shape[1] - (name != "tokens")
        array = np.ones((rows, seq), part)
        for here, batch in found:
            if getattr(batch, name) is not None:
                array[here] = getattr(batch, name)
        joined.append(array)
    return Batch(*joined)
