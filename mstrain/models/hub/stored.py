"""A tensor of a safetensors file, read in parts."""

from pathlib import Path

import numpy as np
from safetensors import safe_open

CHUNK = 2**24  # bytes that are read at once


class Tensor:
    """One tensor of a safetensors file.

    Attributes:
      file, name: where it is.
      shape: its dims.
      dtype: the name that safetensors has for its dtype.
    """

    def __init__(self, file: Path, name: str, shape: tuple[int, ...], dtype: str):
        self.file, self.name, self.shape, self.dtype = file, name, shape, dtype

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` in the tensor's own dtype; the slice of any dim may have a step."""
        whole = tuple(slice(place.start, place.stop) for place in index)
        # Opened for every read: a mapping that stays open counts as memory of this process for all pages it has read.
        with safe_open(self.file, "np") as file:
            return file.get_slice(self.name)[whole][tuple(slice(None, None, place.step) for place in index)]

    def read_into(self, out: np.ndarray, index: tuple[slice, ...]) -> None:
        """Fills `out` with the part `index`, a few rows at a time."""
        rows, step = max(1, CHUNK * len(out) // out.nbytes), index[0].step or 1
        for start in range(0, len(out), rows):
            stop = min(start + rows, len(out))
            first = slice(index[0].start + step * start, index[0].start + step * (stop - 1) + 1, step)
            out[start:stop] = self.read((first, *index[1:]))
