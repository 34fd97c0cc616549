"""The transfers of context-parallel attention in the schedule of a layer compiled for four v5p devices.

    python -m tests.compiler.split_attention ring 32768      exchange (gather or ring), tokens per sequence

Prints the time of every transfer, how much of it overlaps with compute, and the predicted time of the layer. Takes two
CPU minutes.
"""

import sys

import jax.numpy as jnp

from mstrain.compiler import compile_program, make_target, predict
from mstrain.hardware import compiler_options
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.program.parts import layer_program

MODEL = ModelConfig(
    layers=1, width=1024, heads=8, num_kv_heads=2, head_dim=128, mlp_dim=2048, vocab_size=1024, norm="rmsnorm",
    position="rotary", bias="none", gated=True,
)  # fmt: skip
QUICK = {"xla_tpu_scoped_vmem_limit_kib": 16384}  # a lower limit than the chip's shortens the search for tiles


def main(exchange: str, seq: int) -> None:
    target = make_target("v5p-8", "context4-row1-col1")
    plan = make_plan(ParallelConfig(context=exchange), MODEL, target.mesh, 1, seq, target.tpu_slice.chip)
    program = layer_program(MODEL, plan.groups[0][0], seq, seq, jnp.dtype("bfloat16"))
    options = compiler_options(target.tpu_slice.chip, plan.algorithm) | QUICK
    schedule = predict(compile_program(program, target, options))
    print("| transfer | MB | predicted us | hidden us | asynchronous |\n| --- | --- | --- | --- | --- |")
    for transfer in schedule.transfers:
        of = transfer.collective
        numbers = f"{of.bytes / 1e6:.1f} | {1e6 * of.seconds:.0f} | {1e6 * transfer.hidden:.0f}"
        print(f"| {of.kind} | {numbers} | {transfer.asynchronous} |")
    print(f"layer {1e3 * schedule.seconds:.2f} ms predicted, exposed {1e3 * schedule.exposed:.2f} ms")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
