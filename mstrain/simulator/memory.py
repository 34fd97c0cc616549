"""Live memory of a program over time, from the lifetimes of its values.

A value is allocated by the operation that writes it and freed after the last operation that reads it. Program inputs,
and values that no operation reads (results), are never freed. Inputs and outputs of an operation are allocated at the
same time. This is the memory model of DistIR: it has no workspace and no fragmentation.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstrain.simulator.program import Program


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Changes of live memory, sorted by device and time.

    Attributes:
      device: int array of shape (changes,).
      time: float array of shape (changes,), seconds.
      total: int array of shape (changes,), live bytes of the device after the change.
      moment: int array of shape (changes,); consecutive changes with the same number are simultaneous.
    """

    device: np.ndarray
    time: np.ndarray
    total: np.ndarray
    moment: np.ndarray

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """Peak of live memory by device."""
        return {device: int(totals.max()) for device, (_, totals) in self.timelines().items()}

    def timelines(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Times (seconds) and totals (bytes) by device, with one entry for simultaneous changes."""
        shown = (np.append(np.diff(self.device), 1) != 0) | (np.append(np.diff(self.moment), 1) != 0)
        device, time, total = self.device[shown], self.time[shown], self.total[shown]
        devices, begin = np.unique(device, return_index=True)
        parts = zip(devices.tolist(), np.split(time, begin[1:]), np.split(total, begin[1:]))
        return {which: (times, totals) for which, times, totals in parts}


def memory_use(
    program: Program, allocate: np.ndarray, free: np.ndarray, counted: np.ndarray | None = None
) -> MemoryUse:
    """Live memory if operation i allocates its outputs at `allocate[i]` and frees its inputs at `free[i]` (seconds).

    `counted` is a bool array of shape (values,): only values where it is true are counted; None counts all.
    """
    reader = np.full(len(program.value_bytes), -1)
    reader[program.inputs.items] = program.inputs.owner()
    resident, freed = np.flatnonzero(program.resident), np.flatnonzero((reader >= 0) & ~program.resident)
    freed = freed[np.argsort(reader[freed], kind="stable")]
    written, writer = program.outputs.items, program.outputs.owner()
    value = np.concatenate([resident, written, freed])
    # Moments follow program order: program inputs, then for each operation its outputs, then the values it frees.
    moment = np.concatenate([np.full(len(resident), -1), 2 * writer, 2 * reader[freed] + 1])
    time = np.concatenate([np.zeros(len(resident)), allocate[writer], free[reader[freed]]])
    sign = np.repeat([1, 1, -1], [len(resident), len(written), len(freed)])
    kept = np.flatnonzero(counted[value]) if counted is not None else np.arange(len(value))
    order = kept[np.lexsort((moment[kept], time[kept], program.value_device[value[kept]]))]
    device, total = program.value_device[value[order]], np.cumsum((program.value_bytes[value] * sign)[order])
    begin = np.flatnonzero(np.diff(device, prepend=-1))
    before = np.append(0, total)[begin]  # the cumulative sum includes all devices in front
    total -= np.repeat(before, np.diff(np.append(begin, len(total))))
    return MemoryUse(device, time[order], total, moment[order])
