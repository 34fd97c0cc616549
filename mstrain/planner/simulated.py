"""Simulates a plan: one device of every stage, with its links and memory, and a trace."""

from dataclasses import replace

from mstrain.planner.clock import Clock
from mstrain.planner.cost import Costed, cost_plan
from mstrain.planner.request import PlanRequest
from mstrain.planner.step import transformer_step
from mstrain.simulator.cluster import Axes, Cluster, Device
from mstrain.simulator.compared import Compared
from mstrain.simulator.simulate import CORRECTED, place, simulate


def plan_cluster(request: PlanRequest, costed: Costed) -> Cluster:
    """The simulated cluster: devices with the mean FLOP/s of the plan's products, and one link per axis of the plan."""
    plan, pod, at = costed.plan, request.pod, costed.step.at
    axes = Axes(
        ("pipeline", "data", "row", "col"), (plan.pipeline, plan.replicas, plan.rows, plan.cols),
        (at.links.stage, at.links.replica, at.links.row, at.links.col), at.constants.ring,
    )  # fmt: skip
    device = Device(costed.product_rate, at.memory_bandwidth, pod.memory_bytes, kind=pod.chip.name)
    return Cluster.homogeneous(pod.devices, device, axes)


def simulate_plan(request: PlanRequest, costed: Costed, microbatches: int = 8, clock: Clock | None = None) -> Compared:
    """Simulates a plan with at most `microbatches` of its microbatches, but with at least two per stage.

    Raises OutOfTime if the time left on the clock is too short.
    """
    plan = costed.plan
    count = min(plan.microbatches, max(microbatches, 2 * plan.pipeline))
    if plan.chunks > 1:
        count -= count % plan.pipeline
    cluster, same = (
        plan_cluster(request, costed),
        cost_plan(request, replace(plan, microbatches=count), costed.products),
    )
    program = place(transformer_step(request, same), cluster, CORRECTED)
    (clock or Clock()).check(len(program.spec))
    result = simulate(program, cluster)
    return Compared(result, count, same.scheduled_seconds, same.fullest.total)
