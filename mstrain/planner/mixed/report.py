"""Tables of the plans of the optimal planner."""

from collections.abc import Sequence

from rich.table import Table

from mstrain.display.tables import make_table, most_grown
from mstrain.planner.mixed.result import OptimalResult, Plan, named_counts

TERMS = {
    "steady_ms": "steady state", "fill_ms": "fill", "end_ms": "gradients, update", "generator_ms": "batch generator",
}  # fmt: skip


def plans_table(result: OptimalResult) -> Table:
    """The distinct plans in order of step time, with its terms in ms.

    The terms are the steady state and the fill of the pipeline, the exchange of gradients with the update, and the
    batch generator.
    """
    columns = ("plan", "ms", *TERMS.values(), "stages", "microbatches", "bubble", "slower by")
    rows = (
        (
            str(rank),
            *(f"{getattr(plan, term):.1f}" for term in ("cost_ms", *TERMS)),
            str(len(plan.stages)),
            f"{plan.microbatches} x {plan.microbatch}",
            f"{100 * plan.bubble:.0f} %",
            why_slower(plan, result.best),
        )
        for rank, plan in enumerate(result.plans, 1)
    )
    title = "Plans, predicted from the profiles (ms per step; microbatches: number x samples)"
    return make_table(title, columns, rows, ("slower by",))


def why_slower(plan: Plan, best: Plan) -> str:
    """The term that exceeds that of the best plan most, and by how much."""
    if plan is best:
        return "best"
    term, ms = most_grown(tuple(TERMS), plan, best)
    return f"{TERMS[term]} +{ms:.1f} ms"


def stages_table(plan: Plan) -> Table:
    """The terms of every stage of a plan: ms per microbatch; gradient exchange and update in ms per step."""
    left = ("devices", "replicas", "samples")
    columns = ("stage", "layers", "devices", "tp", "replicas", "samples")
    columns += ("compute", "tensor", "pipeline", "sum", "gradients", "update", "GB", "usable GB")
    rows = []
    for number, stage in enumerate(plan.stages):
        terms = (stage.compute_ms + stage.sync_ms, stage.tensor_ms, stage.boundary_ms, stage.stage_ms)
        rows.append((
            *(str(number), stage.layers, named_counts(stage.devices), str(stage.tp)),
            *(named_counts(stage.replicas), named_counts(stage.samples)),
            *(f"{term:.2f}" for term in (*terms, stage.exchange_ms, stage.update_ms)),
            *(f"{stage.state_gb + stage.activation_gb:.1f}", f"{stage.usable_gb:.1f}"),
        ))  # fmt: skip
    title = "Stages of plan 1 (ms per microbatch; exchange of gradients and update: ms per step)"
    return make_table(title, columns, rows, left)


def simulated_table(rows: Sequence[dict]) -> Table:
    """Compute time, idle time and memory of every stage by the cost model and by the simulator."""
    title = "Stages of plan 1: cost model | simulator (ms per step, GB per device)"
    cells = (
        (
            *(str(row["stage"]), row["layers"], row["devices"]),
            *(f"{row[n]:.1f} | {row[f'simulated_{n}']:.1f}" for n in ("compute_ms", "idle_ms", "memory_gb")),
        )
        for row in rows
    )
    return make_table(title, ("stage", "layers", "devices", "compute, ms", "idle, ms", "GB"), cells, ("devices",))
