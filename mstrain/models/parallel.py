"""The parallelism that the user configures: algorithm per layer and half of a block, slice count, dataflow."""

import dataclasses
import re
from typing import ClassVar

from mstrain.gemm import ALGORITHMS, DATAFLOWS, any_sliced, find_algorithm
from mstrain.models.products import HALVES


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The algorithm, dataflow and slice count of the products of a model."""

    SHORTHAND: ClassVar = ("algorithm", tuple(ALGORITHMS))  # parallel=wang is parallel.algorithm=wang

    algorithm: str = "meshslice"
    """Algorithm of every layer; `parallel=wang` is short for `parallel.algorithm=wang`."""
    attention: str | None = None
    """Algorithm of the attention half of every block; null takes `algorithm`."""
    mlp: str | None = None
    """Algorithm of the MLP half of every block; null takes `algorithm`."""
    layers: str | None = None
    """Algorithms of single layers: `LAYERS:ALGO`, `LAYERS:attention:ALGO` or `LAYERS:mlp:ALGO`, separated by spaces.
    LAYERS is a layer (`3`) or an inclusive range (`0-5`, `6-`). The last match applies."""
    slices: str = "auto"
    """MeshSlice's slice count, or `auto`."""
    expert_slices: str = "auto"
    """Number of slices of a device's tokens, each exchanged over mesh axis `expert` while another one is multiplied, or
    `auto`."""
    rows: str = "auto"
    """What the rows of the mesh divide: the batch (`sequences`), or every sequence, like axis `context` (`context`).
    `auto` takes `context` where a microbatch has too few sequences for the rows."""
    context: str = "auto"
    """How devices that divide a sequence exchange keys and values: `gather` before attention, `ring` during attention,
    or `auto` (the one that costs less)."""
    dataflow: str = "auto"
    """Dataflow of every product: `os` (the output stays in place), `ls` (the input), `rs` (the weight), or `auto` (the
    largest of the three stays in place)."""


def layer_algorithms(parallel: ParallelConfig, layers: int) -> list[tuple[str, str]]:
    """(attention, mlp) algorithm of every layer; raises ValueError if `parallel.layers` is invalid."""
    everywhere = [find_algorithm(half or parallel.algorithm).name for half in (parallel.attention, parallel.mlp)]
    names = [list(everywhere) for _ in range(layers)]
    for rule in (parallel.layers or "").split():
        match = re.fullmatch(r"(\d{1,6})(?:(-)(\d{1,6})?)?:(?:(attention|mlp):)?([A-Za-z_]\w*)", rule)
        if not match:
            raise ValueError(
                f"parallel.layers: cannot read {rule!r}. Write LAYERS:ALGO or LAYERS:mlp:ALGO separated by "
                'spaces, such as parallel.layers="0-3:megatron 4-:mlp:fsdp".'
            )
        first, dash, last, half, algorithm = match.groups()
        first = int(first)
        last = int(last) if last else (layers - 1 if dash else first)
        if not first <= last < layers:
            raise ValueError(f"parallel.layers: {rule!r} names layers outside 0-{layers - 1} of this model.")
        for layer in range(first, last + 1):
            for i, name in enumerate(HALVES):
                if half in (None, name):
                    names[layer][i] = find_algorithm(algorithm).name
    return [(attention, mlp) for attention, mlp in names]


def check_effect(parallel: ParallelConfig, used: set[str]) -> None:
    """Raises ValueError for an option that has no effect on the algorithms `used`."""
    if parallel.slices != "auto" and not any_sliced(used):
        raise ValueError(
            f"parallel.slices={parallel.slices} has no effect: no layer uses meshslice. "
            "Remove it, or type parallel=meshslice."
        )
    if parallel.dataflow not in ("auto", *DATAFLOWS):
        raise ValueError(f"parallel.dataflow={parallel.dataflow!r} is unknown. Choose auto, os, ls or rs.")
    choosing = {algorithm.name for algorithm in ALGORITHMS.values() if not algorithm.only_dataflow}
    if parallel.dataflow != "auto" and not used & choosing:
        raise ValueError(
            f"parallel.dataflow={parallel.dataflow} has no effect on {', '.join(sorted(used))}. "
            f"Remove it, or choose one of {', '.join(sorted(choosing))}."
        )


def parse_slices(text: str, key: str = "parallel.slices") -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", str(text)):
        raise ValueError(f"{key}={text!r} is not a slice count. Type a whole number such as 4, or auto.")
    return int(text)
