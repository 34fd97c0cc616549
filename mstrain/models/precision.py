"""8-bit products of a model's layers: `precision=` and `travel=`."""

import dataclasses
from collections.abc import Iterable

from mstrain.gemm import find_algorithm
from mstrain.gemm.precision import Precision
from mstrain.models.config import ModelConfig
from mstrain.models.plan import BlockPlan, ModelPlan, PlanPair


def check_precision(precision: Precision, model: ModelConfig, algorithms: Iterable[str]) -> None:
    """Raises ValueError if `model`, or one of these algorithms, does not multiply in `precision`."""
    if model.experts and not precision.is_full:
        raise ValueError(f"{precision} is for dense layers, and {model.name} has experts. Remove it.")
    left = sorted(name for name in algorithms if find_algorithm(name).product)
    if left and not precision.is_full:
        raise ValueError(
            f"{precision} has no effect on {', '.join(left)}, which leaves products to the compiler. Remove it, or "
            "type parallel=meshslice or parallel=collective."
        )


def in_precision(plan: ModelPlan, precision: Precision) -> ModelPlan:
    """`plan` with the products of all layers in `precision`; the output projection stays in the model's dtype."""

    def of_pair(pair: PlanPair) -> PlanPair:
        into, out = (dataclasses.replace(product, precision=precision) for product in (pair.into, pair.out))
        return dataclasses.replace(pair, into=into, out=out)

    def of_block(block: BlockPlan) -> BlockPlan:
        return dataclasses.replace(block, attention=of_pair(block.attention), mlp=of_pair(block.mlp))

    return plan.with_blocks(of_block)
