"""Reads the scheduled program of a TPU compiler: what a device computes, which collectives run at the same time, and
which are exposed.

The order is that of the program, cycles of compute operations are the compiler's estimates, and times of collectives
follow from bytes, links and the rings that the compiler chose (`mstrain.compiler.collectives`). Not modeled: devices
that run late.
"""

import dataclasses
import functools

from mstrain.compiler.compile import Compiled
from mstrain.compiler.hlo import Module, parse
from mstrain.compiler.machine import EXPECTED, HIGH, LOW, NAMES, Machine, Unknowns, machine_for
from mstrain.compiler.replay import Replay, Transfer
from mstrain.compiler.steps import Translator
from mstrain.program.memory import Memory
from mstrain.timeline import Timeline, exposed_communication


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The activity of one device in one execution of a program.

    Attributes:
      seconds: predicted time.
      exposed: seconds of it in which a link is in use and nothing is computed.
      cycles: estimated cycles by kind: products (gemm), custom kernels, data movement (move), the rest
        (other), and those in which operations wait for the HBM (memory).
      transfers: every collective executed.
      timeline: the picture, for `mstrain.timeline.write_perfetto`.
    """

    machine: Machine
    seconds: float
    exposed: float
    cycles: dict[str, float]
    transfers: tuple[Transfer, ...]
    timeline: Timeline

    @property
    def overlapped(self) -> int:
        """Collectives that a product or kernel hides, wholly or in part."""
        return sum(t.overlapped for t in self.transfers)

    @property
    def blocking(self) -> int:
        """Collectives that are not asynchronous."""
        return sum(not t.asynchronous for t in self.transfers)

    @property
    def hidden(self) -> float | None:
        """Share of the collectives' time in which the device computes; None without collectives."""
        total = sum(t.end - t.begin for t in self.transfers)
        return sum(t.hidden for t in self.transfers) / total if total else None

    @property
    def move_fraction(self) -> float:
        """Cycles of copies and layout changes over cycles of products."""
        return self.cycles["move"] / self.cycles["gemm"] if self.cycles["gemm"] else 0.0

    @property
    def exposed_fraction(self) -> float:
        """Exposed communication over the whole time."""
        return self.exposed / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class CompiledSchedule(Schedule):
    """The schedule of a program that was compiled here.

    Attributes:
      memory: bytes on the device.
      bounds: seconds with the unknown constants at their low and high ends (`mstrain.compiler.machine.Unknowns`).
      ranges: seconds between the ends of each unknown with the others as expected, by name, the longest first.
    """

    memory: Memory
    bounds: tuple[float, float]
    ranges: dict[str, float]


def predict(program: Compiled) -> CompiledSchedule:
    """The schedule of a program compiled for a target, with its bounds."""
    module = parse(program.text)
    schedule = _read(module, machine_for(program.target))

    @functools.cache
    def seconds(unknowns: Unknowns) -> float:
        same = unknowns == EXPECTED
        return schedule.seconds if same else _read(module, machine_for(program.target, unknowns)).seconds

    def alone(end: Unknowns, name: str) -> float:
        return seconds(dataclasses.replace(EXPECTED, **{name: getattr(end, name)}))

    ranges = {text: alone(HIGH, name) - alone(LOW, name) for name, text in NAMES.items()}
    ranges = dict(sorted(ranges.items(), key=lambda item: -item[1]))
    return CompiledSchedule(
        **vars(schedule), memory=program.memory, bounds=(seconds(LOW), seconds(HIGH)), ranges=ranges
    )


def read_schedule(text: str, machine: Machine) -> Schedule:
    """The schedule of an HLO text; raises ValueError when it is not scheduled."""
    return _read(parse(text), machine)


def _read(module: Module, machine: Machine) -> Schedule:
    replay = Replay(machine)
    replay.execute(Translator(module, machine).steps(module.entry))
    transfers = replay.finish()
    timeline = replay.timeline()
    exposed = exposed_communication(timeline).get(0, 0.0)
    return Schedule(machine, replay.time, exposed, replay.cycles, transfers, timeline)
