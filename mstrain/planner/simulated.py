"""The winner, simulated: one rank of every stage, with its links, its memory and a trace."""

import dataclasses

from mstrain.planner.clock import Clock
from mstrain.planner.cost import Costed, cost_plan
from mstrain.planner.request import PlanRequest
from mstrain.planner.step import transformer_step
from mstrain.simulator.cluster import Axes, Cluster
from mstrain.simulator.compared import Compared
from mstrain.simulator.simulate import CORRECTED, place, simulate


def plan_cluster(request: PlanRequest, costed: Costed) -> Cluster:
    """The devices, at the rate of their GEMMs, and one link per axis of the plan."""
    plan, pod = costed.plan, request.pod
    sizes = (plan.pipeline, plan.data, plan.rows, plan.cols)
    constants = pod.constants(sizes, request.dtype)
    links = (*pod.outer_links(sizes, request.dtype), constants.row, constants.col)
    network = Axes(("pipeline", "data", "row", "col"), sizes, links, constants.ring)
    return Cluster.homogeneous(pod.devices, pod.device(constants), network)


def simulate_plan(request: PlanRequest, costed: Costed, microbatches: int = 8, clock: Clock | None = None) -> Compared:
    """Simulates the plan; long steps with so many `microbatches`, at least two per stage, instead of all.

    Raises OutOfTime when the clock leaves too little time for it.
    """
    plan = costed.plan
    count = min(plan.microbatches, max(microbatches, 2 * plan.pipeline))
    if request.fixed.chunks(plan.pipeline) > 1:
        count -= count % plan.pipeline
    cluster = plan_cluster(request, costed)
    program = place(transformer_step(request, costed, count), cluster, CORRECTED, False)
    (clock or Clock()).check(len(program.spec))
    result = simulate(program, cluster)
    same = cost_plan(request, dataclasses.replace(plan, microbatches=count), costed.products)
    return Compared(result, count, same.seconds, same.fullest.memory.total)
