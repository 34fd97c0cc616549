"""Compile for a TPU that is not there, and read from its schedule what a step will cost.

    target = make_target("v5p-64", "4x8")
    schedule = predict(compile_gemm(plan, target, tokens, in_dim, out_dim))
"""

from mstrain.compiler.collectives import Collective, Machine
from mstrain.compiler.compile import (
    DoesNotFit,
    Program,
    compile_flow,
    compile_function,
    compile_gemm,
    compile_layer,
    compile_step,
)
from mstrain.compiler.machine import machine_for
from mstrain.compiler.schedule import Schedule, Transfer, predict, read_schedule
from mstrain.compiler.topology import Target, make_target, missing_compiler, tpu_slice_devices

__all__ = [
    "Collective", "DoesNotFit", "Machine", "Program", "Schedule", "Target", "Transfer",
    "compile_flow", "compile_function", "compile_gemm", "compile_layer", "compile_step", "machine_for",
    "make_target", "missing_compiler", "predict", "read_schedule", "tpu_slice_devices",
]
