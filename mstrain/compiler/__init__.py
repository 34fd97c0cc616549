"""Compiles programs for a TPU that is not present, and predicts their time from the schedule.

target = make_target("v5p-64", "4x8")
schedule = predict(compile_program(product_program(plan, tokens, in_dim, out_dim, jnp.bfloat16), target))
"""

from mstrain.compiler.collectives import Collective
from mstrain.compiler.compile import Compiled, DoesNotFit, OutOfScratch, compile_program
from mstrain.compiler.machine import KernelRates, Machine, machine_for
from mstrain.compiler.replay import Transfer
from mstrain.compiler.schedule import Schedule, predict, read_schedule
from mstrain.compiler.topology import Target, make_target, missing_compiler, tpu_slice_devices

__all__ = [
    "Collective",
    "Compiled",
    "DoesNotFit",
    "KernelRates",
    "Machine",
    "OutOfScratch",
    "Schedule",
    "Target",
    "Transfer",
    "compile_program",
    "machine_for",
    "make_target",
    "missing_compiler",
    "predict",
    "read_schedule",
    "tpu_slice_devices",
]
