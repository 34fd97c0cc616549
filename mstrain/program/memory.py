"""Memory per device of a compiled program, and the error when it does not fit."""

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import Mesh

from mstrain.mesh import platform_of

GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of a compiled program at its peak; `limit` is what the device has, or None when unknown.

    `outputs` are those that do not reuse the memory of donated arguments, `temporaries` what else is alive at the peak,
    `code` is the program itself.
    """

    arguments: int
    outputs: int
    temporaries: int
    code: int
    limit: float | None

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether the device has as much; true when its memory is unknown."""
        return not self.limit or self.peak <= self.limit

    def __str__(self) -> str:
        parts = f"state and batch {_size(self.arguments)}, temporary {_size(self.temporaries)}"
        limit = f" of {_size(self.limit)}" if self.limit else ""
        return f"{_size(self.peak)}{limit} per device ({parts})"

    def check(self) -> None:
        """Raises ValueError when the step cannot fit."""
        if not self.fits:
            most_is_temporary = self.temporaries > self.arguments
            remedy = "remat=full or accumulate=2 (or more)" if most_is_temporary else "a larger mesh="
            raise ValueError(f"The step needs {self}: it will not fit. Type {remedy}, or choose a smaller model=.")


def memory_of(compiled, mesh: Mesh) -> Memory:
    """The memory of a program compiled for the devices of `mesh`, which are present."""
    return read_memory(compiled, mesh, _limit(mesh))


def read_memory(compiled, mesh: Mesh, limit: float | None) -> Memory:
    """XLA's memory analysis of a program for devices of `limit` bytes.

    Buffers of different times share memory, so the size of all temporary buffers can exceed the peak, and the
    peak of XLA's assignment of buffers counts. XLA:CPU reports a peak without most of them.
    """
    analysis = compiled.memory_analysis()
    outputs = max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)
    temporaries = analysis.temp_size_in_bytes
    if analysis.peak_memory_in_bytes and platform_of(mesh) != "cpu":
        temporaries = max(0, analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes - outputs)
    return Memory(
        analysis.argument_size_in_bytes, outputs, temporaries, analysis.generated_code_size_in_bytes, limit
    )  # fmt: skip


def peak_bytes(device: Any) -> int | None:
    """The most bytes that `device` has had in use; None where the platform does not say (CPUs)."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _limit(mesh: Mesh) -> int | None:
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    if device.platform == "cpu":  # emulated devices share the host's memory
        local = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 1024**2:.1f} MiB"
