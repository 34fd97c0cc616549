"""Registers of TPUs, and tiles of whole registers."""

LANES = 128  # values of a row of a vector register; narrower tiles and shards are padded to it
SUBLANES = 8  # its rows of 32-bit values


def largest_tile(size: int, most: int, unit: int = LANES) -> int:
    """The largest multiple of `unit` up to `most` that divides `size`, which is a multiple of `unit`."""
    assert most >= unit and size % unit == 0, f"no tile of {size} in units of {unit}"
    return next(n for n in range(most - most % unit, 0, -unit) if size % n == 0)
