"""Live memory of a program over time, from the lifetimes of its values.

A value takes memory from the operation that writes it until its last reader is done; program inputs stay, and
so do values without a reader (results). An operation holds its inputs and outputs at once. This is DistIR's
model: no workspace, no fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstrain.simulator.program import Program


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Changes of live memory, sorted by device and time.

    Attributes: `device`, `time` (seconds), `total` (bytes after the change) and `moment` (changes with one
    number happen together), int or float arrays of shape (changes,).
    """

    device: np.ndarray
    time: np.ndarray
    total: np.ndarray
    moment: np.ndarray

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """The largest live total of each device."""
        begin = np.flatnonzero(np.diff(self.device, prepend=-1))
        return (
            dict(zip(self.device[begin].tolist(), np.maximum.reduceat(self.total, begin).tolist()))
            if len(begin)
            else {}
        )

    def timelines(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Per device, times and totals, one entry for all changes that happen together."""
        shown = (np.append(np.diff(self.device), 1) != 0) | (np.append(np.diff(self.moment), 1) != 0)
        device, time, total = self.device[shown], self.time[shown], self.total[shown]
        begin = np.flatnonzero(np.diff(device, prepend=-1))
        columns = zip(device[begin].tolist(), np.split(time, begin[1:]), np.split(total, begin[1:]))
        return {which: (times, totals) for which, times, totals in columns}


def memory_use(
    program: Program, allocate: np.ndarray, free: np.ndarray, counted: np.ndarray | None = None
) -> MemoryUse:
    """Live memory if operation i takes its outputs at `allocate[i]` and drops its inputs at `free[i]`.

    `counted`, a bool array of shape (values,), leaves out the values where it is false.
    """
    values = np.arange(len(program.value_bytes))
    reader = np.full(len(values), -1)
    reader[program.inputs.items] = program.inputs.owner()
    resident = values[program.resident]
    freed = values[(reader >= 0) & ~program.resident]
    freed = freed[np.argsort(reader[freed], kind="stable")]
    written, writer = program.outputs.items, program.outputs.owner()
    value = np.concatenate([resident, written, freed])
    # Moments count up in program order: inputs, then per operation first the outputs, then what it frees.
    moment = np.concatenate([np.full(len(resident), -1), 2 * writer, 2 * reader[freed] + 1])
    time = np.concatenate([np.zeros(len(resident)), allocate[writer], free[reader[freed]]])
    sign = np.repeat([1, 1, -1], [len(resident), len(written), len(freed)])
    if counted is not None:
        keep = counted[value]
        value, moment, time, sign = value[keep], moment[keep], time[keep], sign[keep]
    delta = program.value_bytes[value] * sign
    device = program.value_device[value]
    order = np.lexsort((moment, time, device))
    device, delta = device[order], delta[order]
    total = np.cumsum(delta)
    begin = np.flatnonzero(np.diff(device, prepend=-1))
    before = total[begin] - delta[begin]
    total -= np.repeat(before, np.diff(np.append(begin, len(total))))
    return MemoryUse(device, time[order], total, moment[order])
