"""Which collectives of a layer's backward pass run beside which products (`mstrain.gemm.scheduling`).

A TPU's compiler gathers dy of attention's output projection when nothing is left to compute beside it, although the
products of the MLP's weight gradients need nothing that is missing. Groups tie the last reduce_scatter of the MLP's
first product to the first product of the second weight gradient, and each of these gathers to an equal number of others
(docs/performance.md, "Scheduling groups").
"""

import dataclasses

from mstrain.gemm import Plan
from mstrain.gemm.scheduling import SchedulingGroups
from mstrain.models.config import ModelConfig
from mstrain.models.model_plan import BlockPlan, ModelPlan


def with_scheduling_groups(plan: ModelPlan, model: ModelConfig) -> ModelPlan:
    """`plan` with the groups of its layers, if the chip has them and all layers are one loop with dense MLPs.

    An id stands for one group of a program's loop, and the compiler may unroll a loop of one layer.
    """
    one_loop = not model.experts and len(plan.every_group) == 1 and not plan.mtp and not plan.stages
    return plan.with_blocks(_with_groups) if one_loop else plan


def _with_groups(block: BlockPlan) -> BlockPlan:
    attention, mlp = block.attention, block.mlp
    out, into, down = _groups(attention.out, mlp.into, mlp.out)
    return dataclasses.replace(
        block,
        attention=dataclasses.replace(attention, out=dataclasses.replace(attention.out, scheduling=out)),
        mlp=dataclasses.replace(
            mlp,
            into=dataclasses.replace(mlp.into, scheduling=into),
            out=dataclasses.replace(mlp.out, scheduling=down),
        ),
    )


def _groups(out: Plan, into: Plan, down: Plan) -> tuple[SchedulingGroups | None, ...]:
    """The groups of attention's output projection and of the MLP's products."""
    together = (out, into, down)
    if [product.dataflow for product in together] != ["ls", "os", "ls"] or not all(map(_can_schedule, together)):
        return None, None, None
    counts = {product.slices for product in together}
    if counts == {1}:  # one product hides the sum, the next one the gather
        return SchedulingGroups((2,)), SchedulingGroups(last_sum=1, products=(2,)), SchedulingGroups(products=(1,))
    if 1 in counts:
        return None, None, None
    gathers, products = out.slices, down.slices - 1
    each = max(products // gathers, 1)
    beside = [2 + i // each if i // each < gathers else None for i in range(products)]  # of all products but the first
    return (
        SchedulingGroups(gathers=tuple(2 + i if 2 + i in beside else None for i in range(gathers))),
        SchedulingGroups(last_sum=1),
        SchedulingGroups(products=(1, *beside)),
    )


def _can_schedule(product: Plan) -> bool:
    return product.kind.scheduled is not None and product.program in product.lowering.scheduling_groups.split()
