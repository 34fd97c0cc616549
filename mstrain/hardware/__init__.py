"""Chips, TPU slices, the time of collectives on links, and model FLOP/s utilization (MFU)."""

from mstrain.hardware.chips import (
    Chip,
    CompilerOption,
    all_chips,
    chip_for,
    chip_named,
    compiler_options,
    once_options,
    step_options,
)
from mstrain.hardware.link import Link, collective_seconds
from mstrain.hardware.tpu_slices import TpuSlice, parse_target, tpu_slice_of
from mstrain.hardware.utilization import mfu

__all__ = [
    "Chip",
    "CompilerOption",
    "Link",
    "TpuSlice",
    "all_chips",
    "chip_for",
    "chip_named",
    "collective_seconds",
    "compiler_options",
    "mfu",
    "once_options",
    "step_options",
    "parse_target",
    "tpu_slice_of",
]
