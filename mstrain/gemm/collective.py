"""Collective: all_gather whole shards, multiply once, reduce_scatter whole shards (MeshSlice paper, section 2.3.1)."""

from mstrain.gemm.algorithm import DATAFLOWS, Algorithm
from mstrain.gemm.local import NN, NT, TN, all_gather, dot, reduce_scatter
from mstrain.gemm.scheduling import SchedulingGroups


def os(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B. Output-stationary: all-gathers A_MxK along the columns and B_KxN along the rows."""
    return dot(all_gather(a, cols, 1), all_gather(b.astype(a.dtype), rows, -2), NN)


def ls(a, b, rows, cols, slices=1, dot=dot):
    """Y = A B^T. Left-stationary: all-gathers B_NxK along the rows, reduce-scatters Y_MxN along the columns."""
    return reduce_scatter(dot(a, all_gather(b.astype(a.dtype), rows, -2), NT), cols, 1)


def ls_transposed(a, b, rows, cols, slices=1, dot=dot):
    """Y^T = B A^T: `ls` with a transposed result, which no device transposes in memory."""
    return reduce_scatter(dot(all_gather(b.astype(a.dtype), rows, -2), a, NT), cols, 0)


def rs(a, b, rows, cols, slices=1, dot=dot):
    """Y = A^T B. Right-stationary: all-gathers A_KxM along the columns, reduce-scatters Y_MxN along the rows."""
    return reduce_scatter(dot(all_gather(a, cols, 1), b, TN), rows, -2)


def scheduled(dataflow, groups: SchedulingGroups, x, w, dy, rows, cols, slices=1):
    """(dx, dw) of Y = OS(x, w) or LS(x, w) in scheduling groups. For LS dy is gathered once."""
    assert slices == 1 and dataflow in ("os", "ls"), f"{dataflow} in {slices} slices has no scheduling groups"
    w = all_gather(w.astype(dy.dtype), rows, -2)
    if dataflow == "os":
        dx = reduce_scatter(dot(dy, w, NT), cols, 1, groups.last_sum)
        dw = dot(all_gather(x, cols, 1), dy, TN, group=groups.product(0))
    else:
        dy = all_gather(dy, cols, 1, groups.gather(0))
        dx, dw = dot(dy, w, NN), dot(dy, x, TN, group=groups.product(0))
    return dx, reduce_scatter(dw, rows, -2)


ALGORITHM = Algorithm(
    "collective", os, ls, rs, ls_transposed=ls_transposed, scheduled=scheduled, costed=True, grouped=DATAFLOWS
)
