"""The winner, simulated: one rank of every stage, with its links, its memory and a trace."""

import dataclasses

from mstrain.planner.cost import Costed, cost_plan
from mstrain.planner.request import PlanRequest
from mstrain.planner.step import transformer_step
from mstrain.simulator.cluster import Axes, Cluster
from mstrain.simulator.compared import Compared
from mstrain.simulator.simulate import simulate_step


def plan_cluster(request: PlanRequest, costed: Costed) -> Cluster:
    """The devices, at the rate of their GEMMs, and one link per axis of the plan."""
    plan, pod = costed.plan, request.pod
    sizes = (plan.pipeline, plan.data, plan.rows, plan.cols)
    constants = pod.constants(sizes, request.dtype)
    links = (*pod.outer_links(sizes, request.dtype), constants.row, constants.col)
    network = Axes(("pipeline", "data", "row", "col"), sizes, links)
    return Cluster.homogeneous(pod.devices, pod.device(constants), network)


def simulate_plan(request: PlanRequest, costed: Costed, microbatches: int = 8) -> Compared:
    """Simulates the plan; long steps with so many `microbatches`, at least two per stage, instead of all."""
    plan = costed.plan
    count = min(plan.microbatches, max(microbatches, 2 * plan.pipeline))
    if request.fixed.chunks(plan.pipeline) > 1:
        count -= count % plan.pipeline
    result = simulate_step(transformer_step(request, costed, count), plan_cluster(request, costed))
    same = cost_plan(request, dataclasses.replace(plan, microbatches=count), costed.products)
    return Compared(result, count, same.seconds, same.fullest.memory.total)
