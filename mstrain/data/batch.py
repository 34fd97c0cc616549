"""The batch of a step."""

from typing import Any, NamedTuple


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
PACKED = Batch("int32", "int32", "bool")
