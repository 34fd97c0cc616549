"""Spellings of a program, which compilers care about and results do not."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoweringOptions:
    """How a program is spelled out for a compiler. Every form computes the same; which one is fast was read from
    schedules and stands in the table of chips.

    Attributes:
      rs_in_rings: MeshSlice's RS scatters in rings of permutes, which run beside a product where a reduce-scatter would
        block.
      matrix_unit: width of the matrix unit. It pads what is not a multiple of it, so MeshSlice's LS computes its output
        transposed where a device's part of a slice is none. Otherwise it computes it upright, and turns nothing.
      row_major: what stays still in MeshSlice's LS and RS, the output of LS, and what enters and leaves attention have
        the plain layout. Otherwise tokens may become the minor dim of the whole residual stream, and every norm and
        saved activation changes its layout; and LS writes its blocks in another layout than they travel in.
      opaque_slices: MeshSlice slices a float32 weight at a begin that the compiler cannot know. It moves a rounding
        above a static slice, rounds the whole weight, and copies the slices out of it.
    """

    rs_in_rings: bool = False
    matrix_unit: int = 1
    row_major: bool = False
    opaque_slices: bool = False
