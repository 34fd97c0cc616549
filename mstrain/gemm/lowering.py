"""Options that change the compiled program of a product but not its result."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoweringOptions:
    """How a product is lowered for one compiler. The table of chips has the fastest options found in its schedules.

    Attributes:
      rs_in_rings: MeshSlice's RS replaces each reduce_scatter by rings of ppermutes. They overlap with products on
        chips whose reduce_scatter blocks.
      matrix_unit: width of the matrix unit, which pads other sizes to a multiple. MeshSlice's LS computes Y^T if a
        device's part of a slice is not a multiple, and Y without a transpose otherwise.
      row_major: row-major layout of the stationary matrix of MeshSlice's LS and RS, the output of LS, and the inputs
        and outputs of attention. Without it the compiler may make tokens the minor dim of the residual stream, which
        adds relayouts to every norm and saved activation, and may relayout the blocks of LS before they are sent.
      opaque_slices: MeshSlice slices a float32 weight at an offset hidden from the compiler. With a static offset the
        compiler casts the whole weight before it slices, which adds a copy per slice.
      scheduling_groups: the algorithms, separated by spaces, in whose backward pass chosen collectives run beside
        products of the MLP's weight gradients (`mstrain.models.scheduling`).
    """

    rs_in_rings: bool = False
    matrix_unit: int = 1
    row_major: bool = False
    opaque_slices: bool = False
    scheduling_groups: str = ""
