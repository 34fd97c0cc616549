"""Mesh axis `expert`: whether a model's experts divide over it, and in how many slices it exchanges tokens."""

from mstrain.gemm import Plan
from mstrain.gemm.copies import EXPERT
from mstrain.gemm.expert_exchange import MARGIN
from mstrain.hardware import Chip, collective_seconds
from mstrain.hardware.constants import Constants, constants_for
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig
from mstrain.models.flops import mlp_parameters
from mstrain.models.parallel import ParallelConfig, parse_slices
from mstrain.parallel.token_exchange import TokenExchange

SLICES = (1, 2, 4, 8)  # slice counts among which `auto` chooses
UNTUNED = 4  # the most on unknown accelerators
BYTES = 2  # of an activation and of a gradient


def check_experts(model: ModelConfig, parallel: ParallelConfig, shape: MeshShape) -> None:
    """Raises ValueError if the experts of `model` do not divide over axis `expert`, or if a key has no effect."""
    if shape.expert > 1 and model.experts is None:
        raise ValueError(
            f"mesh={shape}: axis {EXPERT} has no effect, because the MLP of model {model.name} is dense. Type "
            f"data{shape.data * shape.expert} instead, or model.experts=8."
        )
    if model.experts and model.experts % shape.expert:
        fits = [n for n in range(2, model.experts + 1) if model.experts % n == 0]
        raise ValueError(
            f"mesh={shape}: model.experts={model.experts} do not divide into {shape.expert} equal parts. Type axis "
            f"{EXPERT} with a size out of {fits}, or a mesh= without it."
        )
    if parallel.expert_slices != "auto" and shape.expert == 1:
        raise ValueError(
            f"parallel.expert_slices={parallel.expert_slices} has no effect: mesh {shape} has no axis {EXPERT}. Remove "
            f"it, or type a mesh= such as mesh=data2-expert2-row1-col2."
        )


def expert_slices(
    parallel: ParallelConfig, model: ModelConfig, into: Plan, tokens: int, chip: Chip | None,
    constants: Constants | None, overlaps: bool,
) -> int:  # fmt: skip
    """Slices in which every device exchanges its tokens; 1 without axis `expert`.

    Args:
      into: of the first product of an expert.
      tokens: of a microbatch of one data-parallel replica, or part of its sequences.
      chip, constants: as in `mstrain.models.plan.make_plan`.
      overlaps: whether collectives of the devices run beside products.
    """
    if into.grid.expert_parts == 1:
        return 1
    tokens //= into.grid.size(tuple(axis for axis in into.input_layout.tokens if axis not in into.grid.copies))
    if parallel.expert_slices == "auto":
        legal = [count for count in SLICES if tokens % count == 0]
        exchange = token_exchange(model, into, tokens, chip, constants)
        return exchange.cheapest(legal) if exchange else max(n for n in legal if n <= UNTUNED) if overlaps else 1
    slices = parse_slices(parallel.expert_slices, "parallel.expert_slices")
    if tokens % slices:
        near = sorted((n for n in range(1, min(tokens, 64) + 1) if tokens % n == 0), key=lambda n: abs(n - slices))[:3]
        raise ValueError(
            f"parallel.expert_slices={slices} does not divide the {tokens} tokens of a device. Type "
            f"parallel.expert_slices={' or '.join(map(str, sorted(near)))}."
        )
    return slices


def token_exchange(
    model: ModelConfig, into: Plan, tokens: int, chip: Chip | None, constants: Constants | None
) -> TokenExchange | None:
    """The exchange of a device's `tokens` in 16 bits, along an open line of devices; None where rates are unknown."""
    if chip is None or chip.hbm_bandwidth is None or (constants is None and chip.platform == "cpu"):
        return None
    try:
        known = constants or constants_for(chip)
    except ValueError:
        return None
    grid, link = into.grid, known.row.permute
    tensor, columns = grid.num_rows * grid.num_cols, grid.size(into.input_layout.features)
    sent = MARGIN * tokens * model.experts_per_token * model.width / columns
    expert = mlp_parameters(model, model.mlp_dim)
    weights = (model.experts or 1) / grid.expert_parts * expert / tensor
    return TokenExchange(
        way=BYTES * sent * grid.expert_parts / (4 * link.bandwidth),
        launch=link.launch + link.sync * grid.expert_parts / 2,
        products=2.0 * tokens * model.experts_per_token * expert / columns / known.flops,
        gather=collective_seconds(known.row.all_gather, BYTES * weights, grid.num_rows),
        add=3 * BYTES * weights / chip.hbm_bandwidth,
    )
