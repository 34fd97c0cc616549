"""Executes the steps of a schedule: one TensorCore, one HBM, and every direction of every link.

A direction of a link carries one collective at a time; on a machine with `in_order` so does a SparseCore, in the order
of their starts. An operation takes the compiler's estimate, or the time in which its own bytes and those of the
collectives beside it pass the HBM, whichever is longer. Copies between memories use the remaining HBM bandwidth; an
operation that waits for a copy waits for the rest of it.
"""

import dataclasses

import numpy as np

from mstrain.compiler.collectives import Collective
from mstrain.compiler.machine import Machine
from mstrain.compiler.steps import COMPUTE_KINDS, Block, Branch, Compute, Copy, Loop, Start, Wait
from mstrain.timeline import Lane, Timeline

CORE = "TensorCore"
MEMORY = "memory"  # cycles in which an operation waits for the HBM
KINDS = (*COMPUTE_KINDS, MEMORY)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One execution of a collective, in seconds.

    `overlapped`: a GeMM or kernel ran between its begin and its wait. `hidden`: seconds of it in which the device
    computed.
    """

    name: str
    collective: Collective
    begin: float
    end: float
    asynchronous: bool
    overlapped: bool
    hidden: float = 0.0


class Replay:
    """One device executing steps; `time` is in seconds, `cycles` by kind of `KINDS`."""

    def __init__(self, machine: Machine):
        self.time = 0.0
        self.cycles: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.hbm_bytes = 0.0  # of operations and copies
        self._machine = machine
        self._trip = 0  # of the loop that runs
        self._free_at = dict.fromkeys(machine.torus.lanes, 0.0)
        self._core_free_at: dict[int, float] = {}  # of a SparseCore
        self._pending: dict[str, Transfer] = {}
        self._done: list[Transfer] = []
        self._copies: dict[str, float] = {}  # bytes that are left, oldest first
        self._flows: list[tuple[float, float, float]] = []  # begin, end, bytes/s of collectives
        self._events: list[tuple] = []  # lane, name, begin, duration, kind, bytes

    def execute(self, steps) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self._compute(step.name, step.kind, step.cycles, step.hbm_bytes)
            elif isinstance(step, Start):
                self._pending[step.handle] = self._send(step.name, step.collective, True)
            elif isinstance(step, Copy):
                self._copies[step.handle] = step.hbm_bytes
                self.hbm_bytes += step.hbm_bytes
            elif isinstance(step, Wait):
                self._wait_for(step.handle)
            elif isinstance(step, Block):
                self._receive(self._send(step.name, step.collective, False))
            elif isinstance(step, Loop):
                self._loop(step)
            elif isinstance(step, Branch):
                self.execute(step.steps if step.trips[self._trip % len(step.trips)] == "1" else step.otherwise)

    def finish(self) -> tuple[Transfer, ...]:
        """Waits for the transfers that are still running; returns all transfers in the order of their waits."""
        for handle in list(self._pending):
            self._receive(self._pending.pop(handle))
        core = [(begin, begin + duration) for lane, _, begin, duration, *_ in self._events if lane == CORE]
        begins, ends = np.array(core).reshape(-1, 2).T
        return tuple(dataclasses.replace(t, hidden=_within(t.begin, t.end, begins, ends)) for t in self._done)

    def _wait_for(self, handle: str) -> None:
        if handle in self._pending:
            self._receive(self._pending.pop(handle))
        elif handle in self._copies:
            names = list(self._copies)
            left = sum(self._copies[name] for name in names[: names.index(handle) + 1])
            seconds = self._seconds(0.0, left)
            if seconds:
                self._events.append((CORE, handle, self.time, seconds, MEMORY, left))
                self.cycles[MEMORY] += seconds * self._machine.clock
                self._advance(seconds, 0.0)
            self._copies.pop(handle)

    def _receive(self, transfer: Transfer) -> None:
        self._advance(max(0.0, transfer.end - self.time), 0.0)
        self._done.append(transfer)

    def _compute(self, name: str, kind: str, cycles: float, hbm_bytes: float) -> None:
        alone = cycles / self._machine.clock
        own = hbm_bytes
        if kind in ("move", "other"):  # XLA's estimate holds these to the HBM, and knows better what they skip
            own = min(own, alone * self._machine.hbm_bandwidth)
        seconds = self._seconds(alone, own)
        self._events.append((CORE, name, self.time, seconds, kind, own))
        self._advance(seconds, own)
        self.hbm_bytes += own
        self.cycles[kind] += cycles
        self.cycles[MEMORY] += (seconds - alone) * self._machine.clock
        if kind in ("gemm", "kernel"):
            self._pending = {h: dataclasses.replace(t, overlapped=True) for h, t in self._pending.items()}

    def _seconds(self, alone: float, own: float) -> float:
        """The shortest time from now in which `own` bytes and those of running collectives pass, at least `alone`."""
        seconds, before = alone, -1.0
        while seconds - before > 1e-6 * seconds:
            before = seconds
            seconds = max(alone, (own + self._traffic(before)) / self._machine.hbm_bandwidth)
        return seconds

    def _traffic(self, seconds: float) -> float:
        """Bytes that collectives take from and to the HBM in the next `seconds`."""
        end = self.time + seconds
        return sum(rate * max(0.0, min(end, until) - max(self.time, begin)) for begin, until, rate in self._flows)

    def _advance(self, seconds: float, own: float) -> None:
        free = seconds * self._machine.hbm_bandwidth - own - self._traffic(seconds)
        for handle, left in self._copies.items():
            used = min(left, max(0.0, free))
            self._copies[handle] = left - used
            free -= used
        self.time += seconds
        self._flows = [flow for flow in self._flows if flow[1] > self.time]

    def _send(self, name: str, collective: Collective, asynchronous: bool) -> Transfer:
        cores = collective.cores if self._machine.in_order else ()
        free = [*(self._free_at[lane] for lane in collective.lanes), *(self._core_free_at.get(c, 0.0) for c in cores)]
        begin = max([self.time, *free])
        end = begin + collective.seconds
        self._core_free_at |= dict.fromkeys(cores, end)
        for lane in collective.lanes:
            self._free_at[lane] = end
            thread = self._machine.torus.lane_name(lane)
            self._events.append((thread, name, begin, collective.seconds, collective.kind, collective.bytes))
        if collective.seconds:
            self._flows.append((begin, end, collective.hbm_bytes / collective.seconds))
        return Transfer(name, collective, begin, end, asynchronous, False)

    def _loop(self, loop: Loop) -> None:
        """Every trip where trips differ or a collective runs inside, one event of each kind otherwise."""
        if _has_events(loop):
            outer = self._trip
            for self._trip in range(loop.trips):
                self.execute(loop.steps)
            self._trip = outer
            return
        trip = Replay(self._machine)
        trip.execute(loop.steps)
        share = trip.hbm_bytes / (sum(trip.cycles.values()) or 1.0)
        for kind, cycles in trip.cycles.items():
            if cycles:
                self._compute(f"{loop.trips} trips", kind, loop.trips * cycles, loop.trips * cycles * share)

    def timeline(self) -> Timeline:
        process = f"one {self._machine.name} device"
        torus = self._machine.torus
        threads = (CORE, *(torus.lane_name(lane) for lane in torus.lanes))
        names = sorted({event[1] for event in self._events})
        number = {name: i for i, name in enumerate(names)}
        columns = list(zip(*self._events)) or [()] * 6
        lane = np.array([threads.index(thread) for thread in columns[0]], dtype=np.int64)
        return Timeline(
            lanes=tuple(Lane(0, process, t if t == CORE else f"{t} links") for t in threads),
            names=tuple(names),
            lane=lane,
            name=np.array([number[name] for name in columns[1]], dtype=np.int64),
            start=np.array(columns[2], dtype=float),
            duration=np.array(columns[3], dtype=float),
            communication=lane > 0,
            args={"kind": np.array(columns[4], dtype=str), "bytes": np.array(columns[5], dtype=float)},
        )


def _has_events(loop: Loop) -> bool:
    return any(isinstance(s, Start | Block | Branch) or isinstance(s, Loop) and _has_events(s) for s in loop.steps)


def _within(begin: float, end: float, begins: np.ndarray, ends: np.ndarray) -> float:
    """Seconds of [begin, end] that lie in the intervals, which are ascending and do not overlap."""
    first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end)
    return float(np.sum(np.minimum(ends[first:last], end) - np.maximum(begins[first:last], begin)))
