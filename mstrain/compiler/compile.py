"""Compiles a program (`mstrain.program`) for a target. Nothing is allocated or run."""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from mstrain.compiler.topology import Target, quiet
from mstrain.program.exhausted import HBM, read_exhausted
from mstrain.program.memory import GIB, Memory, read_memory
from mstrain.program.program import Program, text_of

MIB = 1024**2
VMEM_LIMIT = "xla_tpu_scoped_vmem_limit_kib"  # of a kernel, in KiB


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program: scheduled HLO text, memory on one device, and the seconds it took to compile."""

    name: str
    target: Target
    text: str
    memory: Memory
    seconds: float

    def check_fits(self) -> None:
        """Raises DoesNotFit when a device has too little memory: XLA compiles some programs that do not fit."""
        if not self.memory.fits:
            message = _does_not_fit(self.name, self.target, self.memory.peak)
            raise DoesNotFit(message, self.memory.peak, self.memory.limit)


class DoesNotFit(ValueError):
    """The program needs more HBM than a program may have: `needed` bytes of `limit`, None where unknown."""

    def __init__(self, message: str, needed: float | None = None, limit: float | None = None):
        super().__init__(message)
        self.needed, self.limit = needed, limit


class OutOfScratch(ValueError):
    """A kernel needs more of a memory on the chip, such as VMEM, than its limit; a smaller step does not help."""


def compile_program(
    program: Program,
    target: Target,
    options: Mapping[str, bool | int | str] | None = None,
    dump: str | Path | None = None,
) -> Compiled:
    """Compiles `program`, whose mesh is that of `target`.

    Args:
      options: XLA options instead of the chip's own.
      dump: folder in which the scheduled program is left as NAME.hlo.

    Raises:
      DoesNotFit: with the bytes of HBM the compiler asked for.
      OutOfScratch: where a kernel needs more of another memory.
    """
    name, begin = program.name, time.perf_counter()
    try:
        with quiet():
            compiled = program.compile(options)
            text = text_of(compiled)
    except jax.errors.JaxRuntimeError as error:
        if (exhausted := read_exhausted(error)) is None:
            raise
        space, needed, limit = exhausted
        if space != HBM:
            raise OutOfScratch(_out_of_scratch(name, target, *exhausted)) from None
        message = _does_not_fit(name, target, needed, limit)
        raise DoesNotFit(message, needed, limit or target.tpu_slice.chip.hbm_bytes) from None
    memory = read_memory(compiled, target.mesh, target.tpu_slice.chip.hbm_bytes)
    result = Compiled(name, target, text, memory, time.perf_counter() - begin)
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        (Path(dump) / (re.sub(r"[^\w.-]+", "_", name) + ".hlo")).write_text(text)
    return result


def _does_not_fit(name: str, target: Target, needed: float | None, limit: float | None = None) -> str:
    hbm = target.tpu_slice.chip.hbm_bytes
    have = f"{hbm / GIB:.1f} GiB" if hbm else "its memory"
    if limit:
        have = f"the {limit / GIB:.2f} GiB that the compiler gives a program"
    used = f"{needed / GIB:.2f} GiB of {have}" if needed else f"more than {have}"
    return (
        f"{name} does not fit on {target.tpu_slice.name}: a device would need {used}. Type remat=full, a smaller "
        "batch= or more accumulate=, or take a larger TPU slice."
    )


def _out_of_scratch(name: str, target: Target, space: str, needed: float | None, limit: float | None) -> str:
    used = f"{needed / MIB:.2f} MiB of the {limit / MIB:.2f} MiB" if needed and limit else "more than there is"
    raised = f" Raise {VMEM_LIMIT} to {1024 * math.ceil(needed / MIB)}." if space == "vmem" and needed else ""
    return (
        f"{name} does not compile for {target.tpu_slice.name}: a kernel needs {used} of {space.upper()} that it may "
        f"use. HBM is not what is exhausted.{raised}"
    )
