"""Read a TPU compiler's scheduled program: what a device computes, what travels meanwhile, what is exposed.

Order is the program's, cycles of compute operations are the compiler's estimates, and times of collectives
come from bytes and links (`mstrain.hardware.collective_seconds`). A mesh axis carries one collective at a
time. Not modelled: contention for HBM between links and compute, and devices that run late.
"""

import dataclasses

import numpy as np

from mstrain.compiler.collectives import Collective, Machine
from mstrain.compiler.compile import Compiled
from mstrain.compiler.hlo import parse
from mstrain.compiler.machine import machine_for
from mstrain.compiler.steps import COMPUTE_KINDS, Block, Compute, Loop, Start, Translator, Wait
from mstrain.program.memory import Memory
from mstrain.timeline import Lane, Timeline, exposed_communication


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One execution of a collective, in seconds.

    `overlapped`: a GeMM or kernel ran between its begin and its wait.
    """

    name: str
    collective: Collective
    begin: float
    end: float
    asynchronous: bool
    overlapped: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one device does in one execution of a program.

    Attributes:
      seconds: predicted time.
      exposed: seconds of it in which a link is in use and nothing is computed.
      cycles: estimated cycles by kind: products (gemm), custom kernels, data movement (move), the rest
        (other).
      transfers: every collective executed.
      timeline: the picture, for `mstrain.timeline.write_perfetto`.
      memory: bytes on the device, where the program was compiled here.
    """

    machine: Machine
    seconds: float
    exposed: float
    cycles: dict[str, float]
    transfers: tuple[Transfer, ...]
    timeline: Timeline
    memory: Memory | None = None

    @property
    def overlapped(self) -> int:
        """Collectives that a product or kernel hides, wholly or in part."""
        return sum(t.overlapped for t in self.transfers)

    @property
    def blocking(self) -> int:
        """Collectives that are not asynchronous."""
        return sum(not t.asynchronous for t in self.transfers)

    @property
    def move_fraction(self) -> float:
        """Cycles of copies and layout changes over cycles of products."""
        return self.cycles["move"] / self.cycles["gemm"] if self.cycles["gemm"] else 0.0

    @property
    def exposed_fraction(self) -> float:
        """Exposed communication over the whole time."""
        return self.exposed / self.seconds if self.seconds else 0.0


def predict(program: Compiled) -> Schedule:
    """The schedule of a program compiled for a target."""
    schedule = read_schedule(program.text, machine_for(program.target))
    return dataclasses.replace(schedule, memory=program.memory)


def read_schedule(text: str, machine: Machine) -> Schedule:
    """The schedule of an HLO text; raises ValueError when it is not scheduled."""
    module = parse(text)
    run = _Run(machine)
    run.execute(Translator(module, machine).steps(module.entry))
    run.finish()
    timeline = run.timeline()
    exposed = exposed_communication(timeline).get(0, 0.0)
    return Schedule(machine, run.time, exposed, run.cycles, tuple(run.transfers), timeline)


class _Run:
    """Executes steps on one TensorCore and one link per mesh axis."""

    def __init__(self, machine: Machine):
        self.time = 0.0
        self.cycles = dict.fromkeys(COMPUTE_KINDS, 0.0)
        self.transfers: list[Transfer] = []
        self._machine = machine
        self._free_at = dict.fromkeys(machine.axes, 0.0)
        self._pending: dict[str, Transfer] = {}
        self._events: list[tuple] = []  # lane, name, begin, duration, kind, bytes

    def execute(self, steps) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self._compute(step.name, step.kind, step.cycles)
            elif isinstance(step, Start):
                self._pending[step.handle] = self._send(step.name, step.collective, True)
            elif isinstance(step, Wait) and step.handle in self._pending:
                self._wait(self._pending.pop(step.handle))
            elif isinstance(step, Block):
                self._wait(self._send(step.name, step.collective, False))
            elif isinstance(step, Loop):
                self._loop(step)

    def finish(self) -> None:
        """Waits for what nothing waited for."""
        for handle in list(self._pending):
            self._wait(self._pending.pop(handle))

    def _wait(self, transfer: Transfer) -> None:
        self.time = max(self.time, transfer.end)
        self.transfers.append(transfer)

    def _compute(self, name: str, kind: str, cycles: float) -> None:
        seconds = cycles / self._machine.clock
        self._events.append(("TensorCore", name, self.time, seconds, kind, np.nan))
        self.time += seconds
        self.cycles[kind] += cycles
        if kind in ("gemm", "kernel"):
            self._pending = {h: dataclasses.replace(t, overlapped=True) for h, t in self._pending.items()}

    def _send(self, name: str, collective: Collective, asynchronous: bool) -> Transfer:
        begin = max(self.time, *(self._free_at[axis] for axis in collective.axes))
        for axis in collective.axes:
            self._free_at[axis] = begin + collective.seconds
            self._events.append((axis, name, begin, collective.seconds, collective.kind, collective.bytes))
        return Transfer(name, collective, begin, begin + collective.seconds, asynchronous, False)

    def _loop(self, loop: Loop) -> None:
        total = dict.fromkeys(COMPUTE_KINDS, 0.0)
        if not _sum_cycles(loop, total):  # something travels inside: every trip counts
            for _ in range(loop.trips):
                self.execute(loop.steps)
            return
        for kind, cycles in total.items():
            if cycles:
                self._compute(f"{loop.trips} trips", kind, cycles)

    def timeline(self) -> Timeline:
        process = f"one {self._machine.name} device"
        threads = ("TensorCore", *self._machine.axes)
        names = sorted({event[1] for event in self._events})
        number = {name: i for i, name in enumerate(names)}
        columns = list(zip(*self._events)) or [()] * 6
        lane = np.array([threads.index(thread) for thread in columns[0]], dtype=np.int64)
        return Timeline(
            lanes=tuple(Lane(0, process, t if t == "TensorCore" else f"{t} links") for t in threads),
            names=tuple(names),
            lane=lane,
            name=np.array([number[name] for name in columns[1]], dtype=np.int64),
            start=np.array(columns[2], dtype=float),
            duration=np.array(columns[3], dtype=float),
            communication=lane > 0,
            args={"kind": np.array(columns[4], dtype=str), "bytes": np.array(columns[5], dtype=float)},
        )


def _sum_cycles(loop: Loop, total: dict[str, float], times: int = 1) -> bool:
    """Adds a loop's cycles by kind to `total`; False when it holds anything but computation."""
    for step in loop.steps:
        if isinstance(step, Compute):
            total[step.kind] += step.cycles * loop.trips * times
        elif not isinstance(step, Loop) or not _sum_cycles(step, total, loop.trips * times):
            return False
    return True
