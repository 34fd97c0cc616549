"""Reports of a search: tables, CSV and JSON files, and a plot."""

import dataclasses
import math
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.table import Table

from mstrain.display.plots import MARKERS
from mstrain.display.tables import decimal, make_table, write_csv
from mstrain.json_files import write_json
from mstrain.planner.cost import Costed, Terms
from mstrain.planner.request import PlanRequest
from mstrain.planner.search import PodResult, why_slower

GB = 1e9


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


def plan_row(request: PlanRequest, rank: int, costed: Costed, best: Costed) -> dict:
    """One plan as a flat row: seconds by term, and bytes by category of the stage that needs most memory."""
    plan, fullest = costed.plan, costed.fullest
    memory = {f"{name}_bytes": round(value) for name, value in dataclasses.asdict(fullest).items()}
    return {
        "rank": rank,
        **plan.flat(),
        "microbatch_sequences": plan.sequences(request.batch),
        "slices": " ".join(str(product.slices) for product in costed.products.block),
        "dataflows": " ".join(product.layout.dataflow for product in costed.products.block),
        "layers": " ".join(str(stage.layers) for stage in costed.stages),
        "step_seconds": costed.seconds,
        "uncertainty": costed.uncertainty,
        "tokens_per_second": request.tokens / costed.seconds,
        "mfu": request.utilization(costed.seconds),
        "mfu_causal_attention": request.utilization(costed.seconds, "causal"),
        **{f"{name}_seconds": value for name, value in dataclasses.asdict(costed.terms).items()},
        "fullest_stage": costed.memory.index(fullest),
        **memory,
        "memory_bytes": round(fullest.total),
        "trainable": not costed.why_not_trainable,
        "why_not_trainable": costed.why_not_trainable,
        "why": why_slower(costed, best),
    }


def write_tables(request: PlanRequest, result: PodResult, folder: Path, top: int) -> None:
    """Writes plans.csv, stages.csv and plans.json to `folder`.

    plans.csv has every distinct plan, then the rejected ones; stages.csv each stage of the `top` plans; plans.json the
    `top` plans with their stages.
    """
    rows = [plan_row(request, rank, costed, result.best) for rank, costed in enumerate(result.ranked, 1)]
    refused = [{**item.plan.flat(), "why": item.reason} for item in result.rejected]
    write_csv([*rows, *refused], folder / "plans.csv")
    stages = stage_rows(result, top)
    write_csv(stages, folder / "stages.csv")
    plans = [{**line, "stages": [stage for stage in stages if stage["rank"] == line["rank"]]} for line in rows[:top]]
    document = {
        "model": request.model.name,
        "cluster": request.pod.name,
        "devices": request.pod.devices,
        "batch": request.batch,
        "seq": request.seq,
        "link_constants": result.best.step.at.constants.source,
        "searched_whole_space": result.finished,
        "plans_costed": result.costed,
        "search_seconds": result.seconds,
        "usable_bytes": request.usable_bytes,
        "plans": plans,
        "rejected": refused,
    }
    write_json(document, folder / "plans.json")


def plans_table(request: PlanRequest, result: PodResult, top: int) -> Table:
    """The `top` plans: degrees, milliseconds per step, GB of the device that needs most, and why each is slower."""
    pod = request.pod
    title = f"{request.model.name} on {pod.name} ({pod.devices} devices), predicted by the cost model"
    columns = (
        "", "data", "shard", "tensor", "context", "pipeline", "batches", "remat", "ms", "+-", "MFU full", "causal",
        "GB", "train.py", "why",
    )  # fmt: skip
    rows, first = [], result.ranked[0]
    for rank, costed in enumerate(result.ranked[:top], 1):
        plan = costed.plan
        schedule = f" {plan.schedule}{f' x{plan.chunks}' if plan.chunks > 1 else ''}" if plan.pipeline > 1 else ""
        experts = f", expert {plan.expert}" if plan.expert > 1 else ""
        rows.append((
            str(rank), f"{plan.data}{experts}", plan.shard, plan.tensor_name, str(plan.context),
            f"{plan.pipeline}{schedule}",
            f"{plan.microbatches}x{plan.sequences(request.batch)}", plan.remat,
            decimal(1e3 * costed.seconds, 1e3 * first.seconds), _percent(costed.uncertainty),
            *(_percent(request.utilization(costed.seconds, attention)) for attention in ("full", "causal")),
            decimal(costed.fullest.total / GB, first.fullest.total / GB), "no" if costed.why_not_trainable else "yes",
            why_slower(costed, result.best),
        ))  # fmt: skip
    return make_table(title, columns, rows, ("shard", "tensor", "pipeline", "remat", "why"))


def terms_table(result: PodResult, count: int) -> Table:
    """Milliseconds per step by term of the first `count` plans; the column headings are their ranks."""
    top = result.ranked[:count]
    rows = (
        (name.replace("_", " "), *(decimal(1e3 * getattr(costed.terms, name), 1e3 * top[0].seconds) for costed in top))
        for name in Terms.__dataclass_fields__
    )
    return make_table("Step time by term (ms)", ("", *map(str, range(1, len(top) + 1))), rows, ("",))


def stages_table(result: PodResult) -> Table:
    """Milliseconds per step by term of every stage of the best plan; each row adds up to the step time."""
    return _stages("Stages of plan 1 (ms)", result, "seconds", 1e3, 1, {"stage": "stage"})


def memory_table(result: PodResult) -> Table:
    """GB per device by category of every stage of the best plan."""
    names = {"stage": "stage", "layers": "layers", "microbatches_in_flight": "in flight"}
    return _stages("Memory per device (GB)", result, "bytes", 1 / GB, 2, names)


def _stages(title: str, result: PodResult, unit: str, scale: float, digits: int, names: dict[str, str]) -> Table:
    rows = stage_rows(result, 1)
    columns = [name for name in rows[0] if name.endswith(f"_{unit}")]
    largest = scale * max(row[name] for row in rows for name in columns)
    cells = (
        (*(f"{row[name]:g}" if name != "layers" else row[name] for name in names),
         *(decimal(scale * row[name], largest, digits) for name in columns))
        for row in rows
    )  # fmt: skip
    headings = (name.removesuffix(f"_{unit}").replace("_", " ") for name in columns)
    return make_table(title, (*names.values(), *headings), cells)


def stage_rows(result: PodResult, top: int) -> list[dict]:
    """One row per stage of each of the `top` plans: layers, seconds by term, bytes by category."""
    return [
        {
            "rank": rank,
            "stage": number,
            "layers": " ".join(f"{begin}-{end - 1}" for begin, end in stage.chunks),
            "microbatches_in_flight": stage.in_flight,
            **{f"{name}_seconds": value for name, value in dataclasses.asdict(terms).items()},
            **{f"{name}_bytes": round(value) for name, value in dataclasses.asdict(memory).items()},
            "total_bytes": round(memory.total),
        }
        for rank, costed in enumerate(result.ranked[:top], 1)
        for number, (stage, memory, terms) in enumerate(zip(costed.stages, costed.memory, costed.stage_terms))
    ]


def plot_plans(request: PlanRequest, plans: list[Costed], path: Path) -> Path:
    """Plots throughput against memory of `plans`, colored by pipeline degree; a dashed line marks the usable memory.

    Returns `path`.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    pipelines = sorted({costed.plan.pipeline for costed in plans})
    colors = dict(zip(pipelines, colormaps["viridis"](np.linspace(0, 0.9, len(pipelines)))))
    for marker, algorithm in zip(MARKERS, dict.fromkeys(costed.plan.algorithm for costed in plans)):
        mine = [costed for costed in plans if costed.plan.algorithm == algorithm]
        axes.scatter(
            [costed.fullest.total / GB for costed in mine],
            [request.tokens / costed.seconds for costed in mine],
            marker=marker,
            s=18,
            color=[colors[costed.plan.pipeline] for costed in mine],
            label=algorithm,
        )
    for pipeline, color in colors.items():
        axes.plot([], [], linewidth=4, color=color, label=f"pipeline {pipeline}")
    if math.isfinite(request.usable_bytes):
        axes.axvline(request.usable_bytes / GB, color="black", linewidth=0.8, linestyle="--")
    axes.set(
        xlabel="memory of the fullest device (GB)",
        ylabel="tokens per second (predicted)",
        title=f"{request.model.name} on {request.pod.name}",
    )
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path
