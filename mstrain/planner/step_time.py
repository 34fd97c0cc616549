"""The cost model's seconds of one given training step, without a search."""

from mstrain.gemm import find_algorithm
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, layer_algorithms
from mstrain.planner.cost import Costed, cost_plan
from mstrain.planner.plan import PodPlan, plan_products
from mstrain.planner.request import PlanRequest
from mstrain.planner.target import Pod


def cost_step(
    pod: Pod, model: ModelConfig, parallel: ParallelConfig, shape: MeshShape, batch: int, seq: int, accumulate: int,
    remat: str, dtype: str, shard: str = "none",
) -> Costed | None:  # fmt: skip
    """The cost of a step; None with an algorithm or mesh that the cost model does not know."""
    used = {name for pair in layer_algorithms(parallel, model.layers) for name in pair}
    if not all(find_algorithm(name).costed for name in used):
        return None
    request = PlanRequest(model, pod, (parallel,), batch, seq, dtype)
    plan = PodPlan(shape.copies, parallel, shape.row, shape.col, 1, accumulate, remat, shard)
    products = plan_products(request, plan)
    return None if isinstance(products, str) else cost_plan(request, plan, products)
