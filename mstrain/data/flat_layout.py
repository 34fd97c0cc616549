"""Where the token ids are in a file that others wrote: alone, as Megatron-LM's beside an index, or after the header of
NumPy or llm.c.

Read as ids, a header would be tokens of a text that nobody wrote, and so would be ids read in another dtype.
"""

import os
import struct
from pathlib import Path

import numpy as np

from mstrain.data.token_header import HEADER_BYTES, parse_header

# First of the 256 int32 of the header -> dtype of the ids. The third is their number.
LLM_C = {20240520: "uint16", 20240801: "uint32"}
LLM_C_BYTES = 1024
MEGATRON = b"MMIDIDX\0\0"  # begins FILE.idx; then the version, uint64, and a code of the dtype, uint8
MEGATRON_DTYPES = {1: "uint8", 2: "uint8", 3: "uint16", 4: "uint32", 5: "uint64", 8: "uint16"}  # int32 as uint32
_LOOKED_AT = 1000  # ids that tell whether uint16 is the dtype


def flat_layout(path: Path, descriptor: int, dtype: str) -> tuple[str, int, int]:
    """(dtype of the ids, first byte, number of ids) of an opened file; `dtype` is that of a file without a header.

    Signed ids are read as unsigned ones, so that a negative id is outside every vocabulary. Raises ValueError for a
    file of other content.
    """
    size, head = os.fstat(descriptor).st_size, os.pread(descriptor, HEADER_BYTES, 0)
    if head.startswith(np.lib.format.MAGIC_PREFIX):
        dtype, first, stated = _numpy(path)
    elif len(head) >= LLM_C_BYTES and (llm_c := struct.unpack_from("<3i", head))[0] in LLM_C:
        dtype, first, stated = LLM_C[llm_c[0]], LLM_C_BYTES, llm_c[2]
    elif parse_header(head):
        raise ValueError(f"{path} is a token file of mstrain's own cache: type the data= that it was made from")
    else:
        dtype, first, stated = _beside(path) or dtype, 0, None
    count, rest = divmod(size - first, np.dtype(dtype).itemsize)
    if rest or not count:
        what = f"has {size} bytes, not a whole number of {dtype}" if rest else "is empty"
        raise ValueError(f"{path} {what}: give a file of token ids, or another data.token_dtype=")
    if stated not in (None, count):
        raise ValueError(f"{path} has {count} token ids, but its header states {stated}: copy the file again")
    if dtype == "uint16" and count >= _LOOKED_AT and _are_wide(os.pread(descriptor, 2 * _LOOKED_AT, first)):
        raise ValueError(
            f"{path} has an id below 4 at every second place: its ids are uint32. Type data.token_dtype=uint32"
        )
    return dtype, first, count


def _are_wide(data: bytes) -> bool:
    """Whether the uint16 `data` are rather uint32, whose upper halves are small."""
    low, high = np.frombuffer(data, "<u2").reshape(-1, 2).T
    return high.max() < 4 <= low.max()


def _beside(path: Path) -> str | None:
    """The dtype that the index of Megatron-LM states; None without one."""
    size = len(MEGATRON) + 9
    try:
        with open(path.with_suffix(".idx"), "rb") as file:
            head = file.read(size)
    except OSError:
        return None
    return MEGATRON_DTYPES.get(head[-1]) if head.startswith(MEGATRON) and len(head) == size else None


def _numpy(path: Path) -> tuple[str, int, int]:
    try:
        array = np.load(path, mmap_mode="r")  # pickled objects are refused by default
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an array that NumPy can read ({error}): copy the file again") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
        raise ValueError(
            f"{path} is an array {list(array.shape)} of {array.dtype.str}: save one dim of little-endian integers"
        )
    return f"uint{8 * array.dtype.itemsize}", array.offset, len(array)
