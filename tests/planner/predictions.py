"""The best plan of large models before and after sharded copies, stages and split sequences, by the cost model.

    python -m tests.planner.predictions            writes docs/data/predictions.csv, and prints the table of the page
    python -m tests.planner.predictions again      costs the plans of the file with today's cost model
    python -m tests.planner.predictions print      prints the table

`before` is the best MeshSlice plan with data-parallel copies of everything (for the models of transformer_shmap the
best plan of its layout), `after` the best of all plans that train.py runs. Rows in the file are not searched again.
After a change of the cost model, `again` searches `before`, whose space is small, and costs the plan of every `after`;
where `before` is faster now, it is that of `after`, too. `cost_model` says which one found a plan: `today`'s or an
`earlier` one.
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
SEEDS = {"seed_2_8b": "v2-32", "seed_6_9b": "v3-32"}  # of transformer_shmap, which ran data 4 x tensor 8
OF_SEEDS = {"replicas": "4", "tensor": "8", "pipeline": "1", "context": "1"}  # their `before`
ALL = "attention-in+attention+attention-out+mlp-in+mlp-out"
EACH = (1, 0.5, 2, 4)  # sequences per device


class Step(NamedTuple):
    """A training step: its columns."""

    model: str
    target: str
    seq: int
    batch: int


def steps() -> Iterator[Step]:
    cases = [
        (model, target, 256, 2048)
        for model in ("gpt3_175b", "megatron_nlg_530b")
        for target in ("v5p-512", "v6e-256", "tpu7x-256")
    ]
    cases += [(model, "v6e-256", 256, 8192) for model in ("llama3_8b", "llama3_70b")]
    cases += [("llama3_405b", "v5p-1024", 512, seq) for seq in (8192, 131072)]
    yield from (Step(model, target, 1024, 512) for model, target in SEEDS.items())
    yield from (Step(model, target, seq, int(devices * n)) for n in EACH for model, target, devices, seq in cases)


def request_of(step: Step, space: str) -> PlanRequest:
    given = OF_SEEDS if space == "before" and step.model in SEEDS else SPACES[space]
    return ask(load_preset(step.model), cluster=step.target, batch=step.batch, seq=step.seq, **given)


def predict(step: Step, space: str) -> dict[str, str]:
    """A row of the file; without keys where no plan fits."""
    request = request_of(step, space)
    result = search(request, best_only=True)
    row = {**{name: str(value) for name, value in step._asdict().items()}, "space": space}
    row |= dict.fromkeys(COLUMNS[len(row) :], "") | {"searched": str(result.costed), "cost_model": "today"}
    return row | costs(request, result.trainable[0]) if result.trainable else row


def costs(request: PlanRequest, plan: Costed) -> dict[str, str]:
    """The columns of a plan."""
    return {
        "keys": spelled(train_keys(plan.plan)),
        "seconds": f"{plan.seconds:.3f}",
        "mfu_percent": f"{100 * (request.utilization(plan.seconds) or 0):.1f}",
        "uncertainty_percent": f"{100 * plan.uncertainty:.0f}",
        "memory_gb": f"{plan.fullest.total / 1e9:.1f}",
    }


def plan_of(keys: dict[str, str], layers: int) -> PodPlan:
    """The plan of `train_keys`."""
    shape, stages = parse_mesh(keys["mesh"]), None
    if shape.stage > 1:
        chunks = int(keys["pipeline.interleave"]) if "pipeline.interleave" in keys else None
        stages = make_stages(PipelineConfig(keys["pipeline.schedule"], chunks), shape.stage, layers)
    remat = f"{keys['remat']} offload: {keys['offload']}" if "offload" in keys else keys["remat"]
    parallel = ParallelConfig(keys["parallel"])
    return PodPlan.on(shape, parallel, int(keys["accumulate"]), remat, keys["shard"], stages)


def fill() -> None:
    """Searches what the file lacks; each row is written as soon as it is known."""
    rows = read_rows(FILE)
    known = {tuple(row[name] for name in COLUMNS[:5]) for row in rows}
    for step in steps():
        for space in SPACES:
            if (*map(str, step), space) not in known:
                rows.append(predict(step, space))
                write_rows(FILE, COLUMNS, rows)


def again() -> None:
    """Costs the file with today's cost model; the rows that it found are left."""
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
    """A line per step: both plans, and how much less time the better one takes."""
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
