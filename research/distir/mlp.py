"""A multi-layer perceptron, and the check that parallel degrees divide it."""

from dataclasses import dataclass

from mstrain.simulator.placement import Degrees
from research.distir.rules import RuleSet


@dataclass(frozen=True)
class Mlp:
    """A perceptron of `layers` matrix multiplications, input_dim -> hidden_dim -> ... -> output_dim, and its batch."""

    layers: int
    input_dim: int
    hidden_dim: int
    output_dim: int
    batch: int
    element_bytes: int = 4

    @classmethod
    def square(cls, layers: int, width: int, batch: int, element_bytes: int = 4) -> "Mlp":
        return cls(layers, width, width, width, batch, element_bytes)

    def dims(self, layer: int) -> tuple[int, int]:
        """Shape (in, out) of the weight of a layer."""
        last = layer == self.layers - 1
        return self.hidden_dim if layer else self.input_dim, self.output_dim if last else self.hidden_dim


def check_mlp(mlp: Mlp, degrees: Degrees, rules: RuleSet) -> None:
    """Raises ValueError, with the fix, if `degrees` do not divide the model."""
    d, h, p, k = degrees.data, degrees.tensor, degrees.pipeline, degrees.microbatches
    chunks = p * degrees.interleave
    cut = [mlp.dims(layer)[1 - layer % 2] for layer in range(mlp.layers)]
    odd = next((layer for layer in range(mlp.layers) if h > 1 and cut[layer] % h), 0)
    problems = (
        (min(d, h, p, k, degrees.interleave, mlp.layers, mlp.batch) < 1,
         f"degrees, layers and batch must be at least 1, got {degrees} and {mlp}"),
        (d * k and mlp.batch % (d * k),
         f"batch {mlp.batch} does not split over {d} replicas x {k} microbatches; use a multiple of {d * k}"),
        (h > 1 and mlp.layers % 2,
         f"tensor parallelism splits layers in pairs (columns, then rows), but there are {mlp.layers} "
         f"layers; use {mlp.layers + 1} layers or tensor degree 1"),
        (h > 1 and cut[odd] % h,
         f"layer {odd} is {cut[odd]} wide, which {h} tensor ranks do not divide; "
         "choose a tensor degree that divides the width"),
        (chunks > mlp.layers,
         f"{chunks} pipeline chunks need at least as many layers, not {mlp.layers}; lower the pipeline degree"),
        (rules.first and chunks and mlp.layers % chunks,
         f"rules={rules.name} needs layers ({mlp.layers}) that are a multiple of the pipeline degree "
         f"({chunks}); change it or use rules=corrected"),
        (degrees.interleave > 1 and p == 1, "interleave needs a pipeline degree above 1; set interleave=1"),
    )  # fmt: skip
    for wrong, message in problems:
        if wrong:
            raise ValueError(message)
