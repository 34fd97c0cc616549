"""Fully sharded data parallelism (ZeRO stage 3; Rajbhandari et al., 2020) over the tensor-parallel devices.

The Y-stationary dataflow with every device in one column: activations are not communicated, a weight is all-gathered
before use, and its gradient is reduce-scattered.
"""

from mstrain.gemm.algorithm import Algorithm
from mstrain.gemm.collective import ls, os, rs

ALGORITHM = Algorithm("fsdp", os, ls, rs, dataflows=("os",), rows=("row", "col"), cols=(), costed=True, grouped=("os",))
