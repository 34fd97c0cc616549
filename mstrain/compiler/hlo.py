"""Scheduled HLO text parsed into computations of instructions, without the semantics of operations."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z\d\-]*)\((.*)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(operands), attributes`; the only operand of a constant or parameter is its literal."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> tuple[str, ...]:
        """Computations this instruction calls, in the order of its attributes."""
        found = _CALLED.findall(self.attributes)
        return tuple(name for text in found for name in re.findall(r"[\w.\-]+", text))

    @property
    def bytes(self) -> int:
        """Bytes of the result; of all parts where it is a tuple."""
        return shape_bytes(self.shape)

    def attribute(self, key: str) -> str | None:
        """The text of an attribute such as `body=%x` or `index=3`, without the %."""
        match = re.search(rf'\b{key}="?%?([\w.\-]+)', self.attributes)
        return match[1] if match else None

    def computation(self, key: str) -> str:
        """The computation of an attribute that every instruction of this opcode has, such as the body of a loop."""
        name = self.attribute(key)
        assert name is not None, f"{self.name} has no {key}"
        return name

    @property
    def estimated_cycles(self) -> int:
        """XLA's own cost of this instruction; 0 where it gives none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match else 0

    @property
    def cost_estimate(self) -> dict:
        """`flops` and `bytes_accessed` that a custom kernel states of itself; may be empty."""
        match = re.search(r'"cost_estimate":(\{[^}]*\})', self.attributes)
        return {key: float(value) for key, value in json.loads(match[1]).items()} if match else {}


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name; each lists its instructions in the order of execution."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    @functools.cached_property
    def _by_name(self) -> dict[tuple[str, str], Instruction]:
        return {(name, i.name): i for name, body in self.computations.items() for i in body}

    def find(self, computation: str, name: str) -> Instruction | None:
        return self._by_name.get((computation, name))

    def within(self, instruction: Instruction) -> tuple[tuple[str, Instruction], ...]:
        """(computation, instruction) of everything called by an instruction, to any depth."""
        found = []
        for name in instruction.called:
            for inner in self.computations.get(name, ()):
                found.append((name, inner))
                found.extend(self.within(inner))
        return tuple(found)


def parse(text: str) -> Module:
    """Reads a module; raises ValueError if it is not scheduled, because its order is not that of execution then."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("this HLO text is not scheduled: compile the program, then take compiled.as_text()")
    computations, entry, name, body = {}, "", None, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, body = header[2], []
            entry = name if header[1] else entry
        elif line == "}" or line.startswith("}, execution_thread"):
            computations[name] = tuple(body)
            name = None
        elif name and (match := _INSTRUCTION.match(line)):
            operands, attributes = _split_operands(match[4])
            literal = match[3] in ("constant", "parameter")
            names = (operands,) if literal else tuple(re.findall(r"%([\w.\-]+)", operands))
            body.append(Instruction(match[1], match[2], match[3], names, attributes))
        elif name and body:  # strings that a kernel carries may hold line ends
            body[-1] = dataclasses.replace(body[-1], attributes=body[-1].attributes + line)
    return Module(computations, entry)


def shape_bytes(shape: str) -> int:
    """Bytes of "bf16[16,128]{1,0}" or of a tuple of such."""
    total = 0.0
    for dtype, dims in re.findall(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]", shape):
        total += _element_bytes(dtype) * math.prod(int(n) for n in dims.split(",") if n)
    return int(total)


def hbm_bytes_of_shape(shape: str) -> int:
    """Bytes of the parts of a shape that are in HBM: on-chip memories carry a mark such as S(1) in their layout."""
    parts = re.findall(r"[a-z]+\d*[a-z\d]*\[[\d,]*\](?:\{[^}]*\})?", shape)
    return sum(shape_bytes(part) for part in parts if not re.search(r"S\([1-9]", part))


def _element_bytes(dtype: str) -> float:
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    assert bits is not None, f"the size of {dtype} is not known"
    return int(bits[0]) / 8


def _split_operands(text: str) -> tuple[str, str]:
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:i], text[i + 1 :]
    return text, ""
