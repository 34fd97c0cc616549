"""Predicts the best plans of large models with the cost model, in two spaces of plans, and prints their table.

    python -m tests.planner.predictions            searches the steps that docs/data/predictions.csv lacks
    python -m tests.planner.predictions again      updates the file after a change of the cost model
    python -m tests.planner.predictions print      prints the table

Space `before` has the MeshSlice plans whose data-parallel replicas are not sharded, without pipeline stages and without
split sequences (for the models of transformer_shmap, all plans on data 4 x tensor 8). Space `after` has all plans that
train.py runs.

`again` searches `before`, which is small, and costs the plan of every row of `after` without a search; where the plan
of `before` is faster, it replaces that of `after`. The column `cost_model` states which cost model chose a plan:
`today`, the current one, or an `earlier` one.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from mstrain.mesh import parse_mesh
from mstrain.models.plan import ParallelConfig
from mstrain.models.stages import PipelineConfig, make_stages
from mstrain.models.zoo import load_preset
from mstrain.planner.cost import Costed, cost_step
from mstrain.planner.plan import PodPlan
from mstrain.planner.request import PlanRequest
from mstrain.planner.search import search
from mstrain.planner.trainer import spelled, train_keys
from tests.docs.rows import read_rows, write_rows
from tests.docs.steps import ROOT
from tests.planner.plans import ask

FILE = ROOT / "docs" / "data" / "predictions.csv"
COLUMNS: tuple[str, ...] = (
    "model", "target", "seq", "batch", "space", "keys", "seconds", "mfu_percent", "uncertainty_percent", "memory_gb",
    "searched", "cost_model",
)  # fmt: skip
SPACES = {
    "before": {"algorithm": "meshslice", "shard": "none", "pipeline": "1", "context": "1", "optimizer": "adamw"},
    "after": {},
}
SEEDS = {"seed_2_8b": "v2-32", "seed_6_9b": "v3-32"}  # models of transformer_shmap, which ran on data 4 x tensor 8
SEEDS_BEFORE = {"replicas": "4", "tensor": "8", "pipeline": "1", "context": "1"}  # their space `before`
ALL = "attention-in+attention+attention-out+mlp-in+mlp-out"
SEQUENCES = (1, 0.5, 2, 4)  # per device


class Step(NamedTuple):
    """A training step: the columns of the file that identify it."""

    model: str
    target: str
    seq: int
    batch: int


def steps() -> Iterator[Step]:
    """The steps of the table."""
    cases = [
        (model, target, 256, 2048)
        for model in ("gpt3_175b", "megatron_nlg_530b")
        for target in ("v5p-512", "v6e-256", "tpu7x-256")
    ]
    cases += [(model, "v6e-256", 256, 8192) for model in ("llama3_8b", "llama3_70b")]
    cases += [("llama3_405b", "v5p-1024", 512, seq) for seq in (8192, 131072)]
    yield from (Step(model, target, 1024, 512) for model, target in SEEDS.items())
    yield from (Step(model, target, seq, int(devices * n)) for n in SEQUENCES for model, target, devices, seq in cases)


def request_of(step: Step, space: str) -> PlanRequest:
    given = SEEDS_BEFORE if space == "before" and step.model in SEEDS else SPACES[space]
    return ask(load_preset(step.model), cluster=step.target, batch=step.batch, seq=step.seq, **given)


def predict(step: Step, space: str) -> dict[str, str]:
    """Searches the best plan of a step; its row, with empty columns if no plan fits in memory."""
    request = request_of(step, space)
    result = search(request, best_only=True)
    row = {**{name: str(value) for name, value in step._asdict().items()}, "space": space}
    row |= dict.fromkeys(COLUMNS[len(row) :], "") | {"searched": str(result.costed), "cost_model": "today"}
    return row | costs(request, result.trainable[0]) if result.trainable else row


def costs(request: PlanRequest, plan: Costed) -> dict[str, str]:
    """The columns of the file that describe a plan."""
    return {
        "keys": spelled(train_keys(plan.plan)),
        "seconds": f"{plan.seconds:.3f}",
        "mfu_percent": f"{100 * (request.utilization(plan.seconds) or 0):.1f}",
        "uncertainty_percent": f"{100 * plan.uncertainty:.0f}",
        "memory_gb": f"{plan.fullest.total / 1e9:.1f}",
    }


def plan_of(keys: dict[str, str], layers: int) -> PodPlan:
    """The plan with the keys of train.py `keys`, the inverse of `train_keys`."""
    shape, stages = parse_mesh(keys["mesh"]), None
    if shape.stage > 1:
        chunks = int(keys["pipeline.interleave"]) if "pipeline.interleave" in keys else None
        stages = make_stages(PipelineConfig(keys["pipeline.schedule"], chunks), shape.stage, layers)
    remat = f"{keys['remat']} offload: {keys['offload']}" if "offload" in keys else keys["remat"]
    parallel = ParallelConfig(keys["parallel"])
    return PodPlan.on(shape, parallel, int(keys["accumulate"]), remat, keys["shard"], stages)


def fill() -> None:
    """Searches the steps that the file lacks; writes each row when it is found."""
    rows = read_rows(FILE)
    known = {tuple(row[name] for name in COLUMNS[:5]) for row in rows}
    for step in steps():
        for space in SPACES:
            if (*map(str, step), space) not in known:
                rows.append(predict(step, space))
                write_rows(FILE, COLUMNS, rows)


def again() -> None:
    """Updates the rows that an earlier cost model found."""
    found = {tuple(row[name] for name in COLUMNS[:5]): row for row in read_rows(FILE)}
    for step in steps():
        before, after = ((*map(str, step), space) for space in SPACES)
        if found[before]["cost_model"] != "today":
            found[before] = predict(step, "before")
        if found[after]["cost_model"] == "today" or not found[after]["keys"]:
            continue
        keys = dict(key.split("=", 1) for key in found[after]["keys"].split())
        request = request_of(step, "after")
        plan = cost_step(request, plan_of(keys, request.model.layers))
        assert plan, keys
        found[after] |= {**costs(request, plan), "cost_model": "earlier"}
        best = found[before]
        if best["keys"] and (not plan.fits or float(best["seconds"]) < plan.seconds):
            found[after] |= {name: best[name] for name in COLUMNS[5:10]}
    write_rows(FILE, COLUMNS, [found[*map(str, step), space] for step in steps() for space in SPACES])


def table() -> str:
    """One line per step: the plans of both spaces, and the time that the second one saves."""
    lines = ["| step | before | after | time saved |", "|---|---|---|---|"]
    found = {tuple(row[name] for name in COLUMNS[:5]): row for row in read_rows(FILE)}
    for step in steps():
        pair = [found.get((*map(str, step), space)) for space in SPACES]
        if None in pair:
            continue
        seconds = [float(row["seconds"]) if row and row["seconds"] else None for row in pair]
        saved = f"{100 * (1 - seconds[1] / seconds[0]):.1f} %" if seconds[0] and seconds[1] else ""
        lines.append(f"| `{step.model} {step.target} seq={step.seq} batch={step.batch}` | "
                     + " | ".join(_cell(row) for row in pair if row) + f" | {saved} |")  # fmt: skip
    return "\n".join(lines)


def _cell(row: dict[str, str]) -> str:
    if not row["seconds"]:
        return "does not fit"
    keys = row["keys"].removeprefix("mesh=").replace("parallel=", "").replace(ALL, "products")
    keys = keys.replace(" accumulate=1 ", " ").replace(" shard=none", "")
    return f"{float(row['seconds']):.2f} s, {row['mfu_percent']} %, `{keys}`"


if __name__ == "__main__":
    if sys.argv[1:] != ["print"]:
        again() if sys.argv[1:] == ["again"] else fill()
    print(table())
