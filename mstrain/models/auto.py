"""Resolves `auto` for the products of a block: the tuner's dataflow and slice count."""

from mstrain.hardware import Chip
from mstrain.hardware.constants import Constants, constants_for
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, parse_slices
from mstrain.models.products import projections, sizes_on
from mstrain.parallel.tune import Block, Choice, tune_block


def tune_products(
    model: ModelConfig, parallel: ParallelConfig, shape: tuple[int, int], tokens: int, chip: Chip | None,
    constants: Constants | None = None,
) -> dict[str, Choice]:  # fmt: skip
    """The tuner's dataflow and slice count of every product on a fixed mesh of `shape` (rows, columns).

    `constants` replace those of the chip, which have one link per axis. Returns an empty dict if nothing is `auto`, if
    the chip is unknown, or if no choice is legal (the checks of the plan then report the reason).
    """
    if chip is None or (constants is None and chip.platform == "cpu"):
        return {}
    if parallel.slices != "auto" and parallel.dataflow != "auto":
        return {}
    slices = None if parallel.slices == "auto" else parse_slices(parallel.slices)
    try:
        constants = constants or constants_for(chip)
        sizes = sizes_on(model, *shape)
        products = projections(model, sizes=sizes)
        block = Block(products, tokens, constants, parallel.dataflow, chip.most_slices, slices, chip)
        return {choice.name: choice for choice in tune_block(block, shape)}
    except ValueError:
        return {}
