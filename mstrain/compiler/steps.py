"""The scheduled program as a sequence of steps of a device: compute, start, copy, wait, loop."""

import dataclasses
import re

from mstrain.compiler.collectives import Collective, across_slices, find_collective
from mstrain.compiler.hlo import Instruction, Module, hbm_bytes_of_shape
from mstrain.compiler.kernels import kernel_cycles
from mstrain.compiler.machine import Machine
from mstrain.compiler.traffic import hbm_bytes
from mstrain.gemm.expert_exchange import FURTHER
from mstrain.parallel.schedules import IN_TICKS

FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota", "after-all"}
MOVES = {
    "copy", "transpose", "reshape", "slice", "dynamic-slice", "dynamic-update-slice", "pad", "concatenate",
}  # fmt: skip
PALLAS = "tpu_custom_call"
UNPRICED = ("gather", "scatter", "sort")  # and fusions of them: XLA estimates no cycles, so their bytes count
HOST_TRANSFERS = ("send", "recv-done")
COPIES = {f"{name}-{end}" for name in ("copy", "slice", "dynamic-slice") for end in ("start", "done")}
COMPUTE_KINDS = ("gemm", "kernel", "move", "other")


@dataclasses.dataclass(frozen=True)
class Compute:
    """Keeps the TensorCore busy; `kind` is one of `COMPUTE_KINDS`, `hbm_bytes` pass the HBM meanwhile."""

    name: str
    kind: str
    cycles: float
    hbm_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Start:
    """Starts a collective, which runs beside the following steps. `Wait` refers to its `handle`."""

    name: str
    handle: str
    collective: Collective


@dataclasses.dataclass(frozen=True)
class Copy:
    """Starts a copy between memories of the device, which runs beside the following steps. `Wait` refers to its
    `handle`."""

    handle: str
    hbm_bytes: float


@dataclasses.dataclass(frozen=True)
class Wait:
    """Continues when the collective or copy of `handle` is done."""

    handle: str


@dataclasses.dataclass(frozen=True)
class Block:
    """Starts a collective and waits for it."""

    name: str
    collective: Collective


@dataclasses.dataclass(frozen=True)
class Loop:
    """`steps`, `trips` times."""

    steps: tuple
    trips: int


@dataclasses.dataclass(frozen=True)
class Branch:
    """`steps` in those trips of the loop around it that have a 1 in `trips`, and `otherwise` in the others."""

    steps: tuple
    otherwise: tuple
    trips: str


@dataclasses.dataclass(frozen=True)
class Translator:
    """Turns the instructions of a module into steps on a machine."""

    module: Module
    machine: Machine

    def steps(self, computation: str) -> tuple:
        """The steps of one computation, loops and calls included."""
        found = []
        for instruction in self.module.computations[computation]:
            found.extend(self._translate(computation, instruction))
        updated = {s.handle for s in found if isinstance(s, Start) and s.name != s.handle}
        return tuple(s for s in found if not (isinstance(s, Start) and s.name in updated))

    def _translate(self, computation: str, i: Instruction) -> list:
        if i.opcode == "while":
            return [Loop(self.steps(i.computation("body")), self._trips(i))]
        if i.opcode == "conditional":
            return self._branch(i)
        if i.opcode == "call":
            return list(self.steps(i.called[0]))
        if i.opcode in COPIES:
            return self._copy(computation, i)
        if i.opcode in HOST_TRANSFERS:
            return self._across_slices(computation, i)
        phase, kind = _phase(i), self._kind(i)
        if phase:
            compute = self._compute(computation, i, kind) if kind in ("gemm", "kernel") else []
            if phase == "start":
                collective = find_collective(self.module, computation, i, self.machine)
                return [*([Start(i.name, i.name, collective)] if collective else []), *compute]
            follow = self._follow(computation, i, phase)
            return [*compute, *follow] if phase == "done" else [*follow, *compute]
        collective = find_collective(self.module, computation, i, self.machine)
        if collective is None or any(_continues(name) for name in i.called):
            return self._compute(computation, i, kind)
        if kind in ("move", "other"):
            return [Block(i.name, collective)]
        return [Start(i.name, i.name, collective), *self._compute(computation, i, kind), Wait(i.name)]

    def _branch(self, conditional: Instruction) -> list:
        """The longest branch, in the ticks of a pipeline that take it."""
        *_, other, longest = sorted([(), *(self.steps(name) for name in conditional.called)], key=_cycles)
        ticks = re.search(rf"{IN_TICKS}([01]+)", conditional.attributes)
        return [Branch(longest, other, ticks[1])] if ticks else list(longest)

    def _compute(self, computation: str, i: Instruction, kind: str) -> list:
        operands = [found for name in i.operands if (found := self.module.find(computation, name))]
        moved = hbm_bytes(self.module, computation, i)
        cycles = kernel_cycles(i, operands, self.machine) if kind == "kernel" else i.estimated_cycles
        if not cycles and (i.opcode in UNPRICED or "kind=kCustom" in i.attributes):
            cycles = moved / self.machine.hbm_bandwidth * self.machine.clock
        return [Compute(i.name, kind, cycles, moved)] if cycles else []

    def _copy(self, computation: str, i: Instruction) -> list:
        """The copied value is the result of the `-done`; memory on the chip takes no HBM bandwidth."""
        if i.opcode.endswith("-done"):
            return [Wait(i.operands[0])] if i.operands else []
        if i.opcode == "copy-start":  # its shape is (target, source, ...)
            return [Copy(i.name, hbm_bytes_of_shape(i.shape))]
        source = self.module.find(computation, i.operands[0])
        done = next((j for j in self.module.computations[computation] if j.operands[:1] == (i.name,)), None)
        if done is None:
            return []
        read = done.bytes if source is None or hbm_bytes_of_shape(source.shape) else 0
        return [Copy(i.name, read + hbm_bytes_of_shape(done.shape))]

    def _across_slices(self, computation: str, i: Instruction) -> list:
        """A collective over several TPU slices starts with its `send` and is done with the `recv-done` of its name."""
        source = self.module.find(computation, i.operands[0]) if i.opcode == "recv-done" else i
        attributes = source.attributes if source else ""
        name = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', attributes)
        if not name or "megascale" not in attributes:
            return []
        if i.opcode == "recv-done":
            return [Wait(name[1])]
        return [Start(name[1], name[1], across_slices(self.module, computation, i, self.machine))]

    def _follow(self, computation: str, i: Instruction, phase: str) -> list:
        start = self._start_of(computation, i)
        if start is None:
            return []
        collective = find_collective(self.module, computation, start, self.machine)
        if collective is None:
            return []
        return [Wait(start.name)] if phase == "done" else [Start(i.name, start.name, collective)]

    def _start_of(self, computation: str, i: Instruction) -> Instruction | None:
        """The start of a done or an update, found through tuples, updates and GeMMs that pass it on."""
        for name in i.operands:
            operand = self.module.find(computation, name)
            if operand is None:
                continue
            if _phase(operand) == "start":
                return operand
            carries = (
                operand.opcode in ("get-tuple-element", "tuple", "bitcast")
                or _phase(operand) == "update"
                or any(_continues(called) for called in operand.called)
            )
            if carries and (start := self._start_of(computation, operand)):
                return start
        return None

    def _kind(self, i: Instruction) -> str:
        inside = [i, *(inner for _, inner in self.module.within(i))]
        opcodes = {x.opcode for x in inside if not _is_index(x)}
        if opcodes & {"convolution", "dot"}:
            return "gemm"
        if i.attribute("custom_call_target") == PALLAS:
            return "kernel"
        joins = {"maximum"} if "pad" in opcodes else set()  # padded pieces are joined by their maximum
        return "move" if opcodes & MOVES and opcodes <= MOVES | FREE | joins | {"fusion"} else "other"

    def _trips(self, loop: Instruction) -> int:
        """The known trip count, or the bound that the counter of a scan is compared with; 0 for rounds that an even
        load of experts does not need."""
        if FURTHER in loop.attributes:
            return 0
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(match[1])
        condition = self.module.computations[loop.computation("condition")]
        constants = [i for i in condition if i.opcode == "constant" and i.operands[0].isdigit()]
        # Those of u32 are the number of the device that has the value of a condition on data.
        bounds = [int(i.operands[0]) for i in constants if re.match(r"s\d+\[\]", i.shape)]
        if not bounds:
            raise ValueError(f"loop {loop.name} has no trip count that can be read; use lax.scan")
        return max(bounds)


def _phase(i: Instruction) -> str | None:
    """Which part of an asynchronous operation an instruction is: start, update, done, or none."""
    if i.opcode == "fusion" and (match := re.match(r"async.collective.(start|done)\b", i.name)):
        return match[1]
    match = re.search(r"-(start|update|done)$", i.opcode)
    return match[1] if match else None


def _continues(computation: str) -> bool:
    """Whether a fusion's computation continues a collective that an earlier fusion has started."""
    return computation.startswith("async_collective_fusion")


def _is_index(i: Instruction) -> bool:
    """Whether an instruction is a scalar: these compute start indices of slices, not data."""
    return bool(re.match(r"[su]\d+\[\]", i.shape))


def _cycles(steps) -> float:
    return sum(s.cycles if isinstance(s, Compute) else 0 for s in steps)
