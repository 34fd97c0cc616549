"""What `auto` means: the tuner's answer for a model's products, and for the mesh of a job."""

import dataclasses
import math

from mstrain.hardware import Chip, collective_seconds
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, parse_slices
from mstrain.tuning import Choice, Projection, Tuning, constants_for, tune

STATE_BYTES = 16  # per parameter: float32 weight, gradient and two moments
MOST_SLICES = 8  # unrolled slices cost compile time, and more of them gain little in the cost model
STATE_SHARE = 0.7  # of a device's memory that state may take; activations need the rest


def projections(model: ModelConfig, repeats: int = 1) -> tuple[Projection, ...]:
    """The four products of one block."""
    heads, kv = model.heads * model.head_width, model.num_kv_heads * model.head_width
    up = model.hidden * (2 if model.gated else 1)
    dims = {
        "attention in": (model.width, heads + 2 * kv),
        "attention out": (heads, model.width),
        "mlp in": (model.width, up),
        "mlp out": (model.hidden, model.width),
    }
    return tuple(Projection(name, *dim, repeats) for name, dim in dims.items())


def tune_products(
    model: ModelConfig, parallel: ParallelConfig, shape: tuple[int, int], tokens: int, chip: Chip | None
) -> dict[str, Choice]:
    """The tuner's dataflow and slice count of every product on a fixed mesh.

    Empty when nothing is left to choose, no chip is known, or nothing is legal (the plan's own checks then tell
    why).
    """
    if chip is None or chip.platform == "cpu" or (parallel.slices != "auto" and parallel.dataflow != "auto"):
        return {}
    slices = None if parallel.slices == "auto" else parse_slices(parallel.slices)
    try:
        constants = constants_for(chip)
        tuning = tune(
            projections(model), tokens, math.prod(shape), constants,
            meshes=[shape], slices=slices, max_slices=MOST_SLICES, dataflow=parallel.dataflow,
        )  # fmt: skip
    except ValueError:
        return {}
    return {choice.name: choice for choice in tuning.best.choices}


@dataclasses.dataclass(frozen=True)
class MeshCandidate:
    """A mesh (data, rows, cols) with its predicted seconds for the products and gradient sums of one step."""

    shape: tuple[int, int, int]
    seconds: float
    tuning: Tuning


def rank_meshes(model: ModelConfig, parameters: int, tokens: int, devices: int, chip: Chip) -> list[MeshCandidate]:
    """Every data x row x col mesh of `devices` whose state fits, fastest first by the tuner's cost model.

    Data parallelism adds an all-reduce of each device's share of the gradients, counted as exposed.
    """
    constants, found = constants_for(chip), []
    for data in (d for d in range(1, devices + 1) if devices % d == 0 and tokens % d == 0):
        share = devices // data
        if chip.hbm_bytes and STATE_BYTES * parameters / share > STATE_SHARE * chip.hbm_bytes:
            continue
        tuning = tune(projections(model, model.layers), tokens // data, share, constants)
        gradient = 4 * parameters / share
        links = constants.row
        reduce = collective_seconds(links.reduce_scatter, gradient / data, data)
        reduce += collective_seconds(links.all_gather, gradient / data, data)
        for candidate in tuning.candidates:
            shape = (data, candidate.rows, candidate.cols)
            found.append(MeshCandidate(shape, candidate.seconds + reduce, tuning))
    best = {}
    for candidate in sorted(found, key=lambda c: c.seconds):
        best.setdefault(candidate.shape, candidate)
    return list(best.values())
