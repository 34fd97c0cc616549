"""Inference of a GPT-2-like stack under data, tensor and pipeline parallelism, cut as DistIR cuts GPT-2.

A two-dimensional stand-in for the ONNX file that DistIR imports: rows are tokens, attention is elementwise.
What it keeps is the cut. A block ends with the `mlp.c_proj` product, before its residual sum, so two tensors
cross every pipeline boundary; what follows the last block is a block of its own; blocks are placed on stages
in order, the first stages taking one more. Each block has two all-reduces over the tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstrain.models.stages import even_layers
from mstrain.planner.stages import bounds_of
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import LOCAL, TENSOR, Degrees
from mstrain.simulator.program import OpSpec
from mstrain.simulator.replicas import Step
from mstrain.simulator.slots import Slots
from research.distir.schedules import alternating


@dataclass(frozen=True)
class GptStack:
    """`layers` transformer blocks of `width` on a batch of `rows` tokens."""

    layers: int
    width: int
    rows: int
    element_bytes: int = 2


def check_gpt(gpt: GptStack, degrees: Degrees) -> None:
    """Raise ValueError, with the fix, when the stack cannot be cut by `degrees`."""
    pieces = degrees.data * degrees.microbatches
    if gpt.rows % pieces:
        raise ValueError(
            f"{gpt.rows} rows do not split over {degrees.data} replicas x {degrees.microbatches} "
            f"microbatches; use a multiple of {pieces}"
        )
    if gpt.width % degrees.tensor:
        raise ValueError(f"width {gpt.width} is not a multiple of the tensor degree {degrees.tensor}; change either")
    if degrees.pipeline > gpt.layers + 1:
        raise ValueError(
            f"{degrees.pipeline} stages need at least as many blocks, not {gpt.layers + 1}; lower the pipeline degree"
        )
    if degrees.interleave > 1:
        raise ValueError("GPT inference has no interleaved schedule; set interleave=1")


class _GptStep(PipelineStep):
    """Writes down the operations of one rank, block by block."""

    def __init__(self, gpt: GptStack, degrees: Degrees):
        super().__init__(degrees, gpt.layers + 1)
        self.gpt = gpt
        self.rows = gpt.rows // (degrees.data * degrees.microbatches)
        bounds = bounds_of(even_layers(gpt.layers + 1, degrees.pipeline))
        self.stage_of_block = [stage for stage, (begin, end) in enumerate(bounds) for _ in range(begin, end)]
        self.x = self._tensor(gpt.width, 0, resident=True)
        self.result = -1
        # The residual stream and the last product, as the next block finds them.
        self.carried: dict[int, tuple[int, ...]] = {}

    def _tensor(self, width: int, stage: int, **kwargs) -> int:
        return self.slots.value(self.rows * width * self.gpt.element_bytes, stage, **kwargs)

    def _weight(self, fan_in: int, fan_out: int, stage: int) -> tuple[int, int]:
        size = self.gpt.element_bytes
        return self.slots.resident(fan_in * fan_out * size, stage), self.slots.resident(fan_out * size, stage)

    def _op(self, kind, shapes, stage, inputs, *widths, axis=LOCAL) -> int:
        """Adds an operation with one output of each of `widths` (consecutive slots); returns the first."""
        outputs = tuple(self._tensor(width, stage) for width in widths)
        self.add(OpSpec(kind, shapes, self.gpt.element_bytes), axis, stage, inputs, outputs)
        return outputs[0]

    def _gemm(self, value: int, fan_in: int, fan_out: int, stage: int, reduce: bool = False) -> int:
        out = self._op(
            "Gemm",
            ((self.rows, fan_in), (fan_in, fan_out)),
            stage,
            (value, *self._weight(fan_in, fan_out, stage)),
            fan_out,
        )
        if reduce and self.degrees.tensor > 1:
            out = self._op("AllReduce", ((self.rows, fan_out),), stage, (out,), fan_out, axis=TENSOR)
        return out

    def forward(self, b: int, first: bool) -> None:
        """Block `b` of one microbatch; `first`: of microbatch 0."""
        stage, width = self.stage_of_block[b], self.gpt.width
        local, full = width // self.degrees.tensor, ((self.rows, width),)
        stream = self.x
        if b:
            stream = self._op("Add", full, stage, self.carried[b - 1], width)
        if b == self.gpt.layers:
            self._output(self._op("Tanh", full, stage, (stream,), width), stage, first)
            return
        part = ((self.rows, local),)
        qkv = self._gemm(stream, width, 3 * local, stage)
        query = self._op("Split", ((self.rows, 3 * local),), stage, (qkv,), local, local, local)
        scores = self._op("Add", part, stage, (query, query + 1), local)
        scores = self._op("Softmax", part, stage, (scores,), local)
        mixed = self._op("Mul", part, stage, (scores, query + 2), local)
        attention = self._gemm(mixed, local, width, stage, reduce=True)
        stream = self._op("Add", full, stage, (stream, attention), width)
        hidden = self._gemm(stream, width, 4 * local, stage)
        hidden = self._op("Tanh", ((self.rows, 4 * local),), stage, (hidden,), 4 * local)
        self.carried[b] = (stream, self._gemm(hidden, 4 * local, width, stage, reduce=True))

    def _output(self, value: int, stage: int, first: bool) -> None:
        if self.degrees.microbatches == 1:
            return
        shape = ((self.rows, self.gpt.width),)
        if self.result < 0:
            self.result = self._tensor(self.gpt.width, stage, grows=True)
        inputs = (value,) if first else (Slots.previous(self.result), value)
        spec = OpSpec("Identity" if first else "Concat", shape, self.gpt.element_bytes)
        self.add(spec, LOCAL, stage, inputs, (self.result,))

    def stage(self, chunk: int) -> int:
        return self.stage_of_block[chunk]

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple[bool]:
        return (microbatch == 0 and chunk == self.gpt.layers,)  # elsewhere all are alike

    def messages(self, chunk: int, other: int, direction: int) -> list[tuple[OpSpec, int, int]]:
        """The residual stream and the last product."""
        spec, there = OpSpec("Send", ((self.rows, self.gpt.width),), self.gpt.element_bytes), self.stage(other)
        sent, self.carried[chunk] = self.carried[chunk], tuple(self._tensor(self.gpt.width, there) for _ in range(2))
        return [(spec, value, copy) for value, copy in zip(sent, self.carried[chunk])]


def gpt_step(gpt: GptStack, degrees: Degrees = Degrees()) -> Step:
    """One forward pass of `gpt` under `degrees`. Raises ValueError when they do not fit each other."""
    check_gpt(gpt, degrees)
    writer = _GptStep(gpt, degrees)
    return writer.write(alternating(tuple(writer.stage_of_block), degrees.microbatches, backward=False))
