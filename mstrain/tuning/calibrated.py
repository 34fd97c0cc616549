"""Seconds of a compiled step on emulated CPU devices, from a calibration and the program that runs.

Emulated devices share cores and execute what they are given one after the other, so a step takes the sum of what its
instructions take: products by measured shapes, kernels by the bytes that they read and write, collectives by the fits
of their kind, and what it takes to start the program. A calibration measured every one of them in a loop of its own;
`step_ratio`, of one training step that it measured whole, scales the sum. Nothing is compiled or run for it.
"""

import math
import re
from dataclasses import asdict, dataclass

from mstrain.compiler.collectives import KINDS, replica_group
from mstrain.compiler.hlo import Instruction, Module, parse
from mstrain.compiler.traffic import hbm_bytes
from mstrain.hardware import collective_seconds
from mstrain.hardware.calibration import Calibration
from mstrain.hardware.gemm_times import gemm_seconds

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id",
        "after-all", "opt-barrier", "reshape"}  # fmt: skip
EXPONENTIALS = {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "power", "sine", "cosine",
                "logistic", "erf", "rsqrt", "sqrt"}  # fmt: skip
REDUCTIONS = {"reduce", "reduce-window"}


@dataclass(frozen=True)
class StepTerms:
    """Predicted seconds of one step by what the devices spend them on; they add up to the step."""

    products: float = 0.0
    kernels: float = 0.0
    communication: float = 0.0
    dispatch: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())

    def __add__(self, other: "StepTerms") -> "StepTerms":
        return StepTerms(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def __mul__(self, times: float) -> "StepTerms":
        return StepTerms(*(times * value for value in asdict(self).values()))


def predict_step(text: str, axes: dict[str, int], calibration: Calibration) -> StepTerms:
    """Terms of the compiled program `text` (`Compiled.as_text()`) on a mesh with `axes` of so many devices.

    Raises ValueError for text that is not scheduled HLO, or a collective of which the file has no fit.
    """
    module = parse(text)
    reader = _Reader(module, axes, calibration)
    terms = reader.computation(module.entry)
    entry = module.computations[module.entry]
    arguments = sum(i.opcode == "parameter" for i in entry) + len(entry[-1].operands)
    dispatch = calibration.dispatch_seconds + arguments * calibration.argument_seconds
    # All devices of a mesh share the cores: fewer than were calibrated leave each a larger part.
    share = math.prod(axes.values()) / calibration.devices
    return (terms + StepTerms(dispatch=dispatch)) * (share * calibration.step_ratio)


class _Reader:
    def __init__(self, module: Module, axes: dict[str, int], calibration: Calibration):
        self.module, self.calibration = module, calibration
        self.devices = math.prod(axes.values())

    def computation(self, name: str) -> StepTerms:
        return sum((self.instruction(name, i) for i in self.module.computations[name]), StepTerms())

    def instruction(self, where: str, i: Instruction) -> StepTerms:
        if i.opcode in FREE:
            return StepTerms()
        if i.opcode == "while":
            body, condition = i.computation("body"), i.computation("condition")
            return (self.computation(body) + self.computation(condition)) * _trips(i)
        if i.opcode == "conditional":
            return max((self.computation(name) for name in i.called), key=lambda terms: terms.seconds)
        if i.opcode == "call":
            return self.computation(i.computation("to_apply"))
        if i.opcode in KINDS:
            return StepTerms(communication=self._collective(where, i))
        return self._kernel(where, i)

    def _collective(self, where: str, i: Instruction) -> float:
        size = 2 if i.opcode == "collective-permute" else len(replica_group(i.attributes, self.devices))
        if size == 1:
            return self.calibration.kernel_launch_seconds
        if not self.calibration.links:
            raise ValueError("the calibration was measured on one device and has no collectives")
        links = self.calibration.links["row"]  # emulated devices have no axes: both are the same fit
        nbytes = sum(self._operand(where, i, index).bytes for index in range(len(i.operands)))
        if i.opcode == "collective-permute":
            return collective_seconds(links["permute"], nbytes, size)
        kind = "all_gather" if i.opcode == "all-to-all" else i.opcode.replace("-", "_")
        return collective_seconds(links[kind], nbytes if i.opcode == "all-gather" else nbytes / size, size)

    def _kernel(self, where: str, i: Instruction) -> StepTerms:
        """A product, or a kernel that is bound by its launch, its memory traffic or its arithmetic."""
        inside = [(where, i), *self.module.within(i)]
        products = sum(self._product(place, x) for place, x in inside if x.opcode == "dot")
        busy = sum(
            self.calibration.exponential_seconds * elements(x.shape)
            for _, x in inside if x.opcode in EXPONENTIALS
        )  # fmt: skip
        busy += sum(
            self.calibration.reduction_seconds * self._operand_elements(place, x)
            for place, x in inside if x.opcode in REDUCTIONS
        )  # fmt: skip
        busy += sum(
            self.calibration.transpose_seconds * elements(x.shape)
            for place, x in inside if x.opcode in ("copy", "transpose") and self._reorders(place, x)
        )  # fmt: skip
        if products and i.opcode != "fusion":
            return StepTerms(products=products)
        moved = self.calibration.kernel_seconds(hbm_bytes(self.module, where, i)) + busy
        if products:  # the launch is in the product's time
            return StepTerms(products, max(0.0, moved - self.calibration.kernel_launch_seconds))
        return StepTerms(kernels=moved)

    def _product(self, where: str, i: Instruction) -> float:
        left, right = (dimensions(self._operand(where, i, index).shape) for index in (0, 1))
        summed = math.prod(left[d] for d in _listed(i, "lhs_contracting_dims"))
        batch = math.prod(left[d] for d in _listed(i, "lhs_batch_dims"))
        m, n = (max(1, math.prod(sides) // summed // batch) for sides in (left, right))
        launch = self.calibration.kernel_launch_seconds
        return launch + batch * max(0.0, gemm_seconds(self.calibration.gemm, m, summed, n) - launch)

    def _reorders(self, where: str, i: Instruction) -> bool:
        """Whether a copy or transpose changes the order in memory, dimensions of size one aside."""
        operand = self.module.find(where, i.operands[0])
        if operand is None:
            return False
        sizes = dimensions(i.shape)
        source = _listed(i, "dimensions") if i.opcode == "transpose" else list(range(len(sizes)))
        after = [source[d] for d in _layout(i.shape) if sizes[d] > 1]
        before = [d for d in _layout(operand.shape) if dimensions(operand.shape)[d] > 1]
        return after != before

    def _operand(self, where: str, i: Instruction, index: int) -> Instruction:
        operand = self.module.find(where, i.operands[index])
        assert operand is not None, f"{where} has no {i.operands[index]}"
        return operand

    def _operand_elements(self, where: str, i: Instruction) -> int:
        operand = self.module.find(where, i.operands[0])
        return elements(operand.shape) if operand else 0


def _trips(i: Instruction) -> int:
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes)
    return int(match[1]) if match else 1


def _listed(i: Instruction, key: str) -> list[int]:
    match = re.search(rf"\b{key}=\{{([\d,]+)\}}", i.attributes)
    return [int(n) for n in match[1].split(",")] if match else []


def dimensions(shape: str) -> list[int]:
    """Of "f32[8,64]{1,0}"; of a tuple, those of its first part."""
    match = re.search(r"\[([\d,]*)\]", shape)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _layout(shape: str) -> list[int]:
    """Dimensions from the fastest to the slowest in memory."""
    match = re.search(r"\{([\d,]+)", shape)
    return [int(n) for n in match[1].split(",")] if match else list(reversed(range(len(dimensions(shape)))))


def elements(shape: str) -> int:
    return math.prod(dimensions(shape))
