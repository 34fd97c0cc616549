"""The blocks of the MeshSlice paper section 4.3: GPT-3 175B and Megatron-NLG 530B."""

from mstrain.parallel.dataflow import Projection


def block(hidden: int) -> list[Projection]:
    """The four projections of a GPT block."""
    return [
        Projection("in_proj", hidden, 3 * hidden),
        Projection("out_proj", hidden, hidden),
        Projection("ff1", hidden, 4 * hidden),
        Projection("ff2", 4 * hidden, hidden),
    ]


GPT3, MEGATRON = block(12288), block(20480)
