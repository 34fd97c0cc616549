"""A multi-layer perceptron, its training step's options, and whether it can be cut as asked."""

from __future__ import annotations

from dataclasses import dataclass

from mstrain.simulator.placement import Degrees
from research.distir.rules import RuleSet


@dataclass(frozen=True)
class Mlp:
    """A perceptron and its batch: `layers` matmuls, widths input -> hidden -> ... -> output."""

    layers: int
    input_dim: int
    hidden_dim: int
    output_dim: int
    batch: int
    element_bytes: int = 4

    @classmethod
    def square(cls, layers: int, width: int, batch: int, element_bytes: int = 4) -> Mlp:
        """All widths alike."""
        return cls(layers, width, width, width, batch, element_bytes)

    def dims(self, layer: int) -> tuple[int, int]:
        """(in, out) of one layer's weight."""
        return (
            self.hidden_dim if layer else self.input_dim,
            self.hidden_dim if layer < self.layers - 1 else self.output_dim,
        )


@dataclass(frozen=True)
class StepOptions:
    """Choices beside the degrees; None: what the rule set does.

    `loaded=False` (rules=notebook only) starts with the untransformed inputs on the root device.
    """

    schedule: str | None = None
    optimizer: bool = True
    gather_outputs: bool | None = None
    loaded: bool = True


def check_mlp(mlp: Mlp, degrees: Degrees, rules: RuleSet) -> None:
    """Raise ValueError, with the fix, when the model cannot be cut by `degrees`."""
    d, h, p, k = degrees.data, degrees.tensor, degrees.pipeline, degrees.microbatches
    chunks = p * degrees.interleave
    if min(d, h, p, k, degrees.interleave, mlp.layers, mlp.batch) < 1:
        raise ValueError(f"degrees, layers and batch must be at least 1, got {degrees} and {mlp}")
    if mlp.batch % (d * k):
        raise ValueError(
            f"batch {mlp.batch} does not split over {d} replicas x {k} microbatches; use a multiple of {d * k}"
        )
    if h > 1 and mlp.layers % 2:
        raise ValueError(
            f"tensor parallelism cuts layers in pairs (columns, then rows), but there are {mlp.layers} "
            f"layers; use {mlp.layers + 1} layers or tensor degree 1"
        )
    for layer in range(mlp.layers if h > 1 else 0):
        split = mlp.dims(layer)[1 if layer % 2 == 0 else 0]
        if split % h:
            raise ValueError(
                f"layer {layer} is {split} wide, which {h} tensor ranks do not divide; "
                "choose a tensor degree that divides the width"
            )
    if chunks > mlp.layers:
        raise ValueError(
            f"{chunks} pipeline chunks need at least as many layers, not {mlp.layers}; lower the pipeline degree"
        )
    if rules.root and mlp.layers % chunks:
        raise ValueError(
            f"rules={rules.name} needs layers ({mlp.layers}) that are a multiple of the pipeline degree "
            f"({chunks}); change it or use rules=corrected"
        )
    if degrees.interleave > 1 and p == 1:
        raise ValueError("interleave needs a pipeline degree above 1; set interleave=1")


def chunk_bounds(layers: int, chunks: int) -> list[tuple[int, int]]:
    """Layers [begin, end) of each chunk; when they do not divide, the first chunks get one more."""
    small, extra = divmod(layers, chunks)
    bounds = [0]
    for chunk in range(chunks):
        bounds.append(bounds[-1] + small + (chunk < extra))
    return list(zip(bounds, bounds[1:]))
