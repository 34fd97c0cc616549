"""Helpers that make plans and cost them."""

from mstrain.commands.plans.pod import PodConfig
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.pod import pod_of
from mstrain.models.parallel import ParallelConfig
from mstrain.planner.cost import Costed, cost_plan
from mstrain.planner.plan import PodPlan, plan_products
from mstrain.planner.request import Fixed, PlanRequest
from mstrain.planner.search import rank_meshes


def pod_plan(data, algorithm, rows, cols, pipeline=1, microbatches=1, remat="none", slices="auto", **choices):
    """A plan of one algorithm."""
    parallel = ParallelConfig(algorithm, slices=slices)
    return PodPlan(data, parallel, rows, cols, pipeline, microbatches, remat, **choices)


def ask(model, **keys) -> PlanRequest:
    """The planning request of keys of plan.py."""
    config = PodConfig(model, **keys)
    return config.request(find_pod(config.cluster))


def ranked(model, batch, seq, machine, devices=0, parallel=ParallelConfig(), remat="none") -> list[Costed]:
    """The plans that mesh=auto ranks, on a TPU slice or on `devices` devices of a chip."""
    pod, fixed = pod_of(machine, devices), Fixed(microbatches=1, remat=remat, shard="none")
    return rank_meshes(PlanRequest(model, pod, (parallel,), batch, seq, fixed=fixed))


def cost(request: PlanRequest, plan: PodPlan) -> Costed:
    """The cost of a legal plan."""
    products = plan_products(request, plan)
    assert not isinstance(products, str), products
    return cost_plan(request, plan, products)
