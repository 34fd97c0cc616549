"""The kernels of a step in optimized HLO of XLA:GPU: launches, bytes and FLOPs of each.

On a GPU every instruction of the entry computation and of its loops is one kernel or one copy by the driver: a fusion,
a library call or a single operation. The bytes of a kernel are those of its operands and results, each counted once. Of
an operand that is only sliced or gathered from, the bytes that are read count; of a result that is updated in place
(dynamic-update-slice, scatter), the bytes that are written.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from mstrain.compiler.hlo import Instruction, Module, parse, shape_bytes

MATMUL, ATTENTION, REDUCTION, ELEMENTWISE = "matmul", "attention", "reduction", "elementwise"
CONVERT, COPY, FILL, INDEXED, OTHER = "convert", "copy", "fill", "gather and scatter", "other"
CLASSES = (MATMUL, ATTENTION, REDUCTION, ELEMENTWISE, CONVERT, COPY, FILL, INDEXED, OTHER)
"""Reductions include their elementwise operations. A `convert` changes only the dtype, a `copy` only the position or
order of values (slices, transposes); a `fill` reads nothing."""

_SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element"}
_MOVES = _VIEWS | {
    "parameter", "constant", "tuple", "copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "pad", "broadcast", "iota", "reverse",
}  # fmt: skip
_TAKES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place, with the number of the operand that is written
_PRODUCTS = re.compile(r"__cublas\$|__cutlass|cublas")
_SCORES = re.compile(r"__cudnn\$fmha\w*?(Backward)?[\"$]")
CAUSAL = 0.5  # fraction of the scores that a causal kernel computes
SCORE_PRODUCTS = {False: 2, True: 5}  # forward; backward: scores again, gradients of scores, values, keys, queries


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction: its launches per step, and the bytes (read and written) and FLOPs of one launch."""

    name: str
    kind: str
    launches: int
    bytes: int
    flops: float
    scope: str

    def seconds(self, peak: float, bandwidth: float) -> float:
        """Seconds of all launches; one takes the longer of its FLOPs at `peak` and its bytes at `bandwidth`."""
        return self.launches * max(self.flops / peak, self.bytes / bandwidth)


def read_kernels(text: str) -> list[Kernel]:
    """The kernels of a program in the order of its text; raises ValueError if it is not scheduled."""
    return list(_Reader(parse(text)).kernels())


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over the kernels of one class in a step."""

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


def totals(kernels: list[Kernel], peak: float, bandwidth: float) -> dict[str, Total]:
    """Totals of the classes that occur, in the order of `CLASSES`."""
    found: dict[str, Total] = collections.defaultdict(Total)
    for k in kernels:
        old = found[k.kind]
        found[k.kind] = Total(
            old.launches + k.launches, old.bytes + k.launches * k.bytes, old.flops + k.launches * k.flops,
            old.seconds + k.seconds(peak, bandwidth),
        )  # fmt: skip
    return {kind: found[kind] for kind in CLASSES if kind in found}


class _Reader:
    def __init__(self, module: Module):
        self._module = module

    def kernels(self) -> Iterator[Kernel]:
        yield from self._of(self._module.entry, 1)

    def _of(self, computation: str, times: int) -> Iterator[Kernel]:
        for instruction in self._module.computations[computation]:
            if instruction.opcode == "while":
                yield from self._of(instruction.computation("body"), times * _trips(instruction))
            elif instruction.opcode in ("call", "conditional"):
                for name in instruction.called:
                    yield from self._of(name, times)
            elif instruction.opcode not in _SILENT and not instruction.opcode.endswith("-done"):
                yield self._kernel(computation, instruction, times)

    def _kernel(self, computation: str, instruction: Instruction, times: int) -> Kernel:
        inside = [inner for _, inner in self._module.within(instruction)]
        operands = [self._module.find(computation, name) for name in instruction.operands]
        flops = sum(self._flops(name, inner) for name, inner in self._module.within(instruction))
        flops += self._flops(computation, instruction)
        scope = re.search(r'op_name="([^"]*)"', instruction.attributes)
        return Kernel(
            instruction.name, _kind(instruction, inside), times,
            self._bytes(instruction, [x for x in operands if x is not None]), flops, scope[1] if scope else "",
        )  # fmt: skip

    def _flops(self, computation: str, instruction: Instruction) -> float:
        """FLOPs of a product or of attention; 0 for other instructions."""
        operands = [self._module.find(computation, name) for name in instruction.operands]
        shapes = [_dims(x.shape) for x in operands if x is not None]
        attributes = instruction.attributes
        if instruction.opcode == "custom-call" and (scores := _SCORES.search(attributes)):
            B, T, N, H = shapes[0]
            keys = max(shapes[1][1], shapes[1][2]) if len(shapes[1]) == 4 else T
            return CAUSAL * SCORE_PRODUCTS[bool(scores[1])] * 2.0 * B * N * T * keys * H
        contracted = re.search(r'"?lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d", ]*)', attributes)
        if contracted is None:
            return 0.0
        dims = [int(n) for n in re.findall(r"\d+", contracted[1])]
        return 2.0 * math.prod(_dims(instruction.shape)) * math.prod(shapes[0][d] for d in dims)

    def _bytes(self, instruction: Instruction, operands: list[Instruction]) -> int:
        if instruction.opcode != "fusion":
            return instruction.bytes + sum(x.bytes for x in operands)
        body = self._module.computations[instruction.called[0]]
        parameters = {int(x.operands[0]): x for x in body if x.opcode == "parameter"}
        read = sum(self._read(body, parameters[i]) for i in range(len(parameters)))
        return read + self._written(body, body[-1])

    def _read(self, body: tuple[Instruction, ...], value: Instruction) -> int:
        """Bytes of `value`, a parameter or a view of one, that the other instructions of a fusion read."""
        users = [x for x in body if value.name in x.operands]
        if any(not _is_partial(x, value) and x.opcode not in _VIEWS for x in users):
            return value.bytes
        return min(value.bytes, sum(self._taken(body, x, value) for x in users))

    def _taken(self, body: tuple[Instruction, ...], user: Instruction, value: Instruction) -> int:
        if user.opcode in _VIEWS:
            return self._read(body, user)
        if user.opcode in _UPDATES:
            return 0
        return user.bytes

    def _written(self, body: tuple[Instruction, ...], root: Instruction) -> int:
        by_name = {x.name: x for x in body}
        if root.opcode == "tuple":
            return sum(self._written(body, by_name[name]) for name in root.operands)
        inner = root
        while inner.opcode in _VIEWS and inner.operands[0] in by_name:
            inner = by_name[inner.operands[0]]
        if inner.opcode in _UPDATES:
            return by_name[inner.operands[_UPDATES[inner.opcode]]].bytes
        return root.bytes


def _trips(loop: Instruction) -> int:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if found is None:
        raise ValueError(f"the trip count of the loop {loop.name} is not a constant of the program")
    return int(found[1])


def _is_partial(user: Instruction, value: Instruction) -> bool:
    """Whether `user` takes or updates only a part of `value`."""
    return user.opcode in (*_TAKES, *_UPDATES) and user.operands[0] == value.name


def _kind(instruction: Instruction, inside: list[Instruction]) -> str:
    whole = [instruction, *inside]
    calls = " ".join(x.attributes for x in whole if x.opcode == "custom-call")
    opcodes = {x.opcode for x in whole}
    if "dot" in opcodes or _PRODUCTS.search(calls):
        return MATMUL
    if _SCORES.search(calls):
        return ATTENTION
    if opcodes & {"gather", "scatter", "sort"}:
        return INDEXED
    if opcodes & {"reduce", "reduce-window"}:
        return REDUCTION
    large = {x.opcode for x in whole if x.opcode != "fusion" and _elements(x.shape) > 1}
    if large <= {"constant", "broadcast", "iota", "copy", "tuple"} and not instruction.operands:
        return FILL
    if large <= _MOVES:
        return COPY
    if large <= _MOVES | {"convert"}:
        return CONVERT
    return OTHER if instruction.opcode == "custom-call" else ELEMENTWISE


@functools.cache
def _dims(shape: str) -> tuple[int, ...]:
    """Dims of an array, or of the first element of a tuple."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def _elements(shape: str) -> int:
    return math.prod(_dims(shape)) if shape_bytes(shape) else 0
