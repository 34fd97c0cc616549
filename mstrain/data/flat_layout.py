"""Where the token ids are in a file that others wrote: alone, or after the header of NumPy or llm.c.

Read as ids, a header would be tokens of a text that nobody wrote.
"""

import os
import struct
from pathlib import Path

import numpy as np

from mstrain.data.token_header import HEADER_BYTES, parse_header

# First of the 256 int32 of the header -> dtype of the ids. The third is their number.
LLM_C = {20240520: "uint16", 20240801: "uint32"}
LLM_C_BYTES = 1024


def flat_layout(path: Path, descriptor: int, dtype: str) -> tuple[str, int, int]:
    """(dtype of the ids, first byte, number of ids) of an opened file; `dtype` is that of a file without a header.

    Signed ids are read as unsigned ones, so that a negative id is outside every vocabulary. Raises ValueError for a
    file of other content.
    """
    size, head = os.fstat(descriptor).st_size, os.pread(descriptor, HEADER_BYTES, 0)
    if head.startswith(np.lib.format.MAGIC_PREFIX):
        dtype, first, stated = _numpy(path)
    elif len(head) >= LLM_C_BYTES and (magic := struct.unpack_from("<i", head)[0]) in LLM_C:
        dtype, first, stated = LLM_C[magic], LLM_C_BYTES, struct.unpack_from("<3i", head)[2]
    elif parse_header(head):
        raise ValueError(f"{path} is a token file of mstrain's own cache: type the data= that it was made from")
    else:
        dtype, first, stated = dtype, 0, None
    count, rest = divmod(size - first, np.dtype(dtype).itemsize)
    if rest or not count:
        what = f"has {size} bytes, not a whole number of {dtype}" if rest else "is empty"
        raise ValueError(f"{path} {what}: give a file of token ids, or another data.token_dtype=")
    if stated not in (None, count):
        raise ValueError(f"{path} has {count} token ids, but its header states {stated}: copy the file again")
    return dtype, first, count


def _numpy(path: Path) -> tuple[str, int, int]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an array that NumPy can read ({error}): copy the file again") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
        raise ValueError(
            f"{path} is an array {list(array.shape)} of {array.dtype.str}: save one dim of little-endian integers"
        )
    return f"uint{8 * array.dtype.itemsize}", array.offset, len(array)
