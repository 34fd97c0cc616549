"""Tables of the optimal planner's plans."""

from collections.abc import Sequence

from rich.table import Table

from mstrain.display.tables import make_table, most_grown
from mstrain.planner.mixed.result import OptimalResult, Plan, named_counts


def plans_table(result: OptimalResult) -> Table:
    """The distinct plans, fastest first, with the terms of their cost."""
    columns = ("", "ms", "steady", "fill", "end", "data", "stages", "batches", "bubble", "why")
    rows = (
        (
            str(rank),
            *(f"{t:.1f}" for t in (plan.cost_ms, plan.steady_ms, plan.fill_ms, plan.end_ms, plan.generator_ms)),
            str(len(plan.stages)),
            f"{plan.microbatches}x{plan.microbatch}",
            f"{100 * plan.bubble:.0f} %",
            why_slower(plan, result.best),
        )
        for rank, plan in enumerate(result.plans, 1)
    )
    return make_table("Plans, predicted from the profiles (ms per iteration)", columns, rows, ("why",))


def why_slower(plan: Plan, best: Plan) -> str:
    if plan is best:
        return "best"
    term, ms = most_grown(("steady_ms", "fill_ms", "end_ms", "generator_ms"), plan, best)
    return f"{term.removesuffix('_ms')} +{ms:.1f} ms"


def stages_table(plan: Plan) -> Table:
    """Every term of a plan's stages: ms per microbatch, of the exchange and update per iteration."""
    left = ("devices", "replicas", "samples")
    columns = ("stage", "layers", "devices", "tp", "replicas", "samples")
    columns += ("compute", "tensor", "pipeline", "stage", "exchange", "update", "GB", "of")
    rows = []
    for number, stage in enumerate(plan.stages):
        terms = (stage.compute_ms + stage.sync_ms, stage.tensor_ms, stage.boundary_ms, stage.stage_ms)
        rows.append((
            *(str(number), stage.layers, named_counts(stage.devices), str(stage.tp)),
            *(named_counts(stage.replicas), named_counts(stage.samples)),
            *(f"{term:.2f}" for term in (*terms, stage.exchange_ms, stage.update_ms)),
            *(f"{stage.state_gb + stage.activation_gb:.1f}", f"{stage.usable_gb:.1f}"),
        ))  # fmt: skip
    title = "Stages of plan 1 (ms per microbatch; exchange and update per iteration)"
    return make_table(title, columns, rows, left)


def simulated_table(rows: Sequence[dict]) -> Table:
    """Cost model and simulator side by side, stage by stage."""
    title = "Stages of plan 1: cost model | simulator (ms of a step, GB of a device)"
    cells = (
        (
            *(str(row["stage"]), row["layers"], row["devices"]),
            *(f"{row[n]:.1f} | {row[f'simulated_{n}']:.1f}" for n in ("compute_ms", "idle_ms", "memory_gb")),
        )
        for row in rows
    )
    return make_table(title, ("stage", "layers", "devices", "compute", "idle", "memory"), cells, ("devices",))
