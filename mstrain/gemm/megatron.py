"""Megatron 1-D tensor parallelism with sequence parallelism (Korthikanti et al., 2022).

The W-stationary dataflow with every tensor-parallel device in one row: the projection into a block gathers
token shards and splits features, the projection out of it sums features and scatters tokens. Residual stream and
norms are sharded over tokens.
"""

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.collective import ls, os, rs

ALGORITHM = Algorithm("megatron", os, ls, rs, dataflows=("rs",), rows=(), cols=("row", "col"), costed=True)
