"""Megatron 1-D tensor parallelism with sequence parallelism (Korthikanti et al., 2022).

The W-stationary dataflow with every tensor-parallel device in one row: the projection into a block all-gathers tokens
and shards features; the projection out of it reduce-scatters over tokens. The residual stream and the norms are sharded
over tokens.
"""

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.collective import ls, ls_transposed, os, rs

ALGORITHM = Algorithm(
    "megatron", os, ls, rs, ls_transposed=ls_transposed, dataflows=("rs",), rows=(), cols=("row", "col"), costed=True,
    grouped=("rs",),
)  # fmt: skip
