"""plan.py planner=optimal: plans for mixed clusters described by Metis's files."""

import dataclasses
import json
from dataclasses import dataclass, fields
from pathlib import Path

from rich.table import Table

from mstrain.commands.plans.output import console, make_folder, progress
from mstrain.planner.mixed import OptimalResult, PlanOptions, plan_optimal, write_csv
from mstrain.planner.mixed import write_json as write_optimal_json
from mstrain.planner.mixed.hosts import read_hosts
from mstrain.planner.mixed.simulated import simulate_mixed, stage_rows
from mstrain.simulator.plots import write_pictures

NOT_TRAINABLE = (
    "train.py runs none of these plans: it has no pipeline and gives every device the same share, while "
    "they have stages of unequal devices. For the hosts of one kind alone, type planner=pod cluster=CHIP:N."
)


@dataclass(frozen=True)
class Files:
    """Where a mixed cluster is described.

    Attributes:
      hostfile: one line `ADDRESS slots=K` per host.
      clusterfile: JSON object, ADDRESS -> instance_type, inter_bandwidth and intra_bandwidth (GB/s), memory
        (GB).
      profiles: folder of DeviceType.<TYPE>_tp<T>_bs<S>.json files.
      run_dir: where tables go.
    """

    hostfile: str
    clusterfile: str
    profiles: str
    run_dir: str = "runs/plan"

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.hostfile, self.clusterfile, self.profiles


def with_files(options: type, name: str):
    """A flat dataclass of the keys of `Files` and of `options`, checked as both check themselves."""
    required = [(f.name, f.type) for kind in (Files, options) for f in fields(kind) if _required(f)]
    rest = [
        (f.name, f.type, dataclasses.field(default=f.default))
        for kind in (Files, options)
        for f in fields(kind)
        if not _required(f)
    ]
    config = dataclasses.make_dataclass(name, [*required, *rest], frozen=True)
    config.files = property(lambda self: _part(Files, self))
    config.options = property(lambda self: _part(options, self))
    config.__doc__ = f"{Files.__doc__}\n{options.__name__}: {', '.join(f.name for f in fields(options))}"
    return config


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING


def _part(kind: type, config):
    return kind(**{f.name: getattr(config, f.name) for f in fields(kind)})


OptimalConfig = with_files(PlanOptions, "OptimalConfig")


def run_optimal(config) -> int:
    """Prints the best plans with their terms and the certificate, simulates the best; writes all of it."""
    options, folder = config.options, make_folder(config.run_dir)
    with progress("planner=optimal", options.max_seconds):
        result = plan_optimal(*config.files.paths, options)
    write_optimal_json(result, folder / "optimal.json")
    write_csv(result, folder / "optimal.csv")
    say = console()
    say.print(plans_table(result))
    say.print(stages_table(result.best))
    proof = result.certificate
    reason = "proven optimal over the space" if proof.proven else "the time budget ended the search"
    say.print(
        f"lower bound {proof.lower_bound_ms:.3f} ms, gap {100 * result.gap:.2f} %: {reason} "
        f"({proof.expanded} labels, {proof.seconds:.2f} s)"
    )
    written = ["optimal.json", "optimal.csv"]
    if options.simulate:
        written += simulate_best(config, result, folder)
    say.print(NOT_TRAINABLE)
    say.print(f"{', '.join(written)} in {folder}")
    return 0


def simulate_best(config, result: OptimalResult, folder: Path) -> list[str]:
    """Simulates the best plan; prints it beside the cost model, writes numbers, trace and pictures."""
    plan = result.best
    hosts = read_hosts(config.hostfile, config.clusterfile)
    simulated = simulate_mixed(plan, config.options, hosts)
    rows = stage_rows(plan, simulated)
    say = console()
    say.print(simulated_table(rows))
    part = (
        ""
        if simulated.microbatches == plan.microbatches
        else f", {simulated.microbatches} of the {plan.microbatches} microbatches"
    )
    predicted = simulated.predicted_ms
    change = 100 * (simulated.ms / predicted - 1)
    say.print(
        f"Simulated{part}: {simulated.ms:.1f} ms, cost model {predicted:.1f} ms ({change:+.1f} %); "
        f"{simulated.result.program.num_ops:,} operations on {len(simulated.result.program.devices)} devices"
    )
    document = {
        "microbatches": simulated.microbatches,
        "step_ms": simulated.ms,
        "predicted_ms": predicted,
        "stages": rows,
    }
    (folder / "simulation.json").write_text(json.dumps(document, indent=1) + "\n")
    shown = [devices[0] for devices in simulated.devices]
    return [*write_pictures(simulated.result, folder, shown), "simulation.json"]


def simulated_table(rows: list[dict]) -> Table:
    """Cost model and simulator side by side, stage by stage."""
    title = "Stages of plan 1: cost model | simulator (ms of a step, GB of a device)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("stage", "layers", "devices", "compute", "idle", "memory"):
        table.add_column(name, justify="left" if name == "devices" else "right", no_wrap=True)
    for row in rows:
        pairs = [
            f"{row[name]:.1f} | {row[f'simulated_{name}']:.1f}"
            for name in ("compute_ms", "idle_ms", "memory_gb")
        ]
        table.add_row(str(row["stage"]), row["layers"], row["devices"], *pairs)
    return table


def stages_table(plan) -> Table:
    """Every term of the best plan's stages: ms per microbatch, of the exchange and update per iteration."""
    table = Table(
        title="Stages of plan 1 (ms per microbatch; exchange and update per iteration)",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    which = ("stage", "layers", "devices", "tp", "replicas", "samples")
    what = ("compute", "tensor", "pipeline", "stage", "exchange", "update", "GB", "of")
    for name in (*which, *what):
        left = name in ("devices", "replicas", "samples")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for number, stage in enumerate(plan.stages):
        terms = (stage.compute_ms + stage.sync_ms, stage.tensor_ms, stage.boundary_ms, stage.stage_ms)
        table.add_row(
            str(number),
            stage.layers,
            _named(stage.devices),
            str(stage.tp),
            _named(stage.replicas),
            _named(stage.samples),
            *(f"{term:.2f}" for term in (*terms, stage.exchange_ms, stage.update_ms)),
            f"{stage.state_gb + stage.activation_gb:.1f}",
            f"{stage.usable_gb:.1f}",
        )
    return table


def plans_table(result: OptimalResult) -> Table:
    """The distinct plans, cheapest first, with the terms of their cost."""
    table = Table(
        title="Plans, predicted from the profiles (ms per iteration)", title_justify="left", box=None
    )
    for name in ("", "ms", "steady", "fill", "end", "data", "stages", "batches", "bubble", "why"):
        table.add_column(name, justify="left" if name == "why" else "right", no_wrap=True)
    for rank, plan in enumerate(result.plans, 1):
        terms = (plan.cost_ms, plan.steady_ms, plan.fill_ms, plan.end_ms, plan.generator_ms)
        table.add_row(
            str(rank),
            *(f"{term:.1f}" for term in terms),
            str(len(plan.stages)),
            f"{plan.microbatches}x{plan.microbatch}",
            f"{100 * plan.bubble:.0f} %",
            why_dearer(plan, result.best),
        )
    return table


def why_dearer(plan, best) -> str:
    """The term that grew most over the best plan's."""
    if plan is best:
        return "best"
    terms = ("steady_ms", "fill_ms", "end_ms", "generator_ms")
    term = max(terms, key=lambda name: getattr(plan, name) - getattr(best, name))
    return f"{term.removesuffix('_ms')} +{getattr(plan, term) - getattr(best, term):.1f} ms"


def _named(counts: dict[str, int]) -> str:
    return " ".join(f"{name} {count}" for name, count in counts.items())
