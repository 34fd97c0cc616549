"""Compiles a program (`mstrain.program`) for a target. Nothing is allocated or run."""

import dataclasses
import re
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from mstrain.compiler.topology import Target, quiet
from mstrain.program.memory import GIB, Memory, read_memory
from mstrain.program.program import Program, text_of


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program: scheduled HLO text, memory on one device, and the seconds it took to compile."""

    name: str
    target: Target
    text: str
    memory: Memory
    seconds: float

    def check_fits(self) -> None:
        """Raises DoesNotFit when a device has too little memory: XLA compiles some that nothing holds."""
        if not self.memory.fits:
            raise DoesNotFit(_does_not_fit(self.name, self.target, self.memory.peak), self.memory.peak)


class DoesNotFit(ValueError):
    """The program needs more memory than a device of the target has: `needed` bytes, None where unknown."""

    def __init__(self, message: str, needed: float | None = None):
        super().__init__(message)
        self.needed = needed


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
      DoesNotFit: with the bytes the compiler asked for.
    """
    name, begin = program.name, time.perf_counter()
    try:
        with quiet():
            compiled = program.compile(options)
            text = text_of(compiled)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            needed = needed_bytes(str(error))
            message = _does_not_fit(name, target, needed, limit_bytes(str(error)))
            raise DoesNotFit(message, needed) from None
        raise
    memory = read_memory(compiled, target.mesh, target.tpu_slice.chip.hbm_bytes)
    result = Compiled(name, target, text, memory, time.perf_counter() - begin)
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        (Path(dump) / (re.sub(r"[^\w.-]+", "_", name) + ".hlo")).write_text(text)
    return result


# What XLA:TPU says; the amount includes arguments and results, whatever it calls them.
_NEEDED = (
    r"total memory required for HLO temporaries \(([\d.]+)([KMGT])\)",  # before anything has a place
    r"Used ([\d.]+)([KMGT]) of \S+ hbm",  # when places are given out
)
# The limit beside it.
_LIMIT = (r"exceeds available HBM \(([\d.]+)([KMGT])", r"Used \S+ of ([\d.]+)([KMGT]) hbm")


def needed_bytes(error: str) -> float | None:
    """The bytes that a program would need, from the compiler's message that it does not fit."""
    return _bytes(error, _NEEDED)


def limit_bytes(error: str) -> float | None:
    """The bytes that the compiler lets a program use: it reserves a part of a device's memory."""
    return _bytes(error, _LIMIT)


def _bytes(error: str, patterns: tuple[str, ...]) -> float | None:
    """Of the first pattern that the message has."""
    match = next(filter(None, (re.search(pattern, error) for pattern in patterns)), None)
    return float(match[1]) * 1024.0 ** (1 + "KMGT".index(match[2])) if match else None


def _does_not_fit(name: str, target: Target, needed: float | None, limit: float | None = None) -> str:
    hbm = target.tpu_slice.chip.hbm_bytes
    have = f"{hbm / GIB:.1f} GiB" if hbm else "its memory"
    if limit:
        have = f"the {limit / GIB:.2f} GiB that the compiler gives a program"
    used = f"{needed / GIB:.2f} GiB of {have}" if needed else f"more than {have}"
    return (
        f"{name} does not fit on {target.tpu_slice.name}: a device would need {used}. Type remat=full, a smaller "
        "batch= or more accumulate=, or take a larger slice."
    )
