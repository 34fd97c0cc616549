"""The planner beside compiled steps: those of the table of overlap, and those of docs/data/steps.csv that it can price.

python -m tests.planner.steps    prints the two tables of docs/planning.md, and the error of the terms of steps
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping

from mstrain.hardware.clusters import find_pod
from mstrain.hardware.overlap import Entry, overlap_table
from mstrain.mesh import parse_mesh
from mstrain.models.parallel import ParallelConfig
from mstrain.models.zoo import load_preset
from mstrain.planner.cost import Costed, cost_plan, cost_step
from mstrain.planner.plan import PodPlan, Product, Products, plan_products
from mstrain.planner.request import PlanRequest
from tests.docs.steps import STEP, name_of, read_steps, step_name

PARTS = ("products", "kernels", "copies", "other", "exposed")  # of a compiled step, in docs/data/steps.csv
CHOICES = (*STEP, "algorithm", "mesh", "shard")
HEAD = "| step | algorithm, mesh | planner ms | compiled ms | ratio |\n|---|---|---|---|---|"


def cost_of(row: Mapping) -> Costed | None:
    """A compiled step by the planner; None if it cannot price it."""
    model = dataclasses.replace(load_preset(row["model"]), layers=int(row["layers"]))
    parallel = ParallelConfig(row["algorithm"])
    request = PlanRequest(model, find_pod(row["target"]), (parallel,), int(row["batch"]), int(row["seq"]))
    plan = PodPlan.on(parse_mesh(row["mesh"]), parallel, 1, row["remat"], row["shard"])
    if cost_step(request, plan) is None:
        return None
    return cost_plan(request, plan, as_compiled(plan_products(request, plan), row.get("plan", "")))


def planned(row: Mapping) -> float | None:
    """The planner's milliseconds of a step, without stragglers; None if it cannot price it."""
    costed = cost_of(row)
    return 1e3 * costed.scheduled_seconds if costed else None


def as_compiled(products: Products | str, text: str) -> Products:
    """The products with the dataflows and slice counts of a compiled plan in slices: `os ls os ls S=4 3 4 4`."""
    assert isinstance(products, Products), products
    flows, _, counts = text.partition(" S=")
    if not counts:
        return products

    def compiled(product: Product, flow: str, count: int) -> Product:
        algorithm = "collective" if count == 1 else "meshslice"
        layout = dataclasses.replace(product.layout, dataflow=flow)
        return dataclasses.replace(product, layout=layout, slices=count, algorithm=algorithm)

    ((block, share),) = products.groups
    block = tuple(compiled(*each) for each in zip(block, flows.split(), map(int, counts.split())))
    return dataclasses.replace(products, groups=((block, share),))


def entries() -> Iterator[tuple[str, Entry, float]]:
    """(algorithm, entry, the planner's milliseconds) of every step of the table of overlap."""
    plans = {tuple(row[name] for name in CHOICES): row["plan"] for row in read_steps()}
    for (_, algorithm), entry in overlap_table().items():
        row = {**dataclasses.asdict(entry), "algorithm": algorithm, "shard": "none"}
        found = planned({**row, "plan": plans[tuple(str(row[name]) for name in CHOICES)]})
        assert found is not None, "a step that was compiled is legal"
        yield algorithm, entry, found


def compared() -> Iterator[tuple[dict[str, str], float]]:
    """(row, the planner's milliseconds over the compiled ones).

    Of equal steps with different compiler options the fastest counts: that of the options in the table of chips.
    """
    best: dict[tuple, dict[str, str]] = {}
    for row in read_steps():
        key = tuple(row[name] for name in CHOICES)
        if float(row["ms"]) < float(best[key]["ms"] if key in best else math.inf):
            best[key] = row
    for row in best.values():
        if found := planned(row):
            yield row, found / float(row["ms"])


def term_errors() -> Iterator[tuple[str, list[float]]]:
    """(term, the planner's seconds over the compiled ones) of the steps without recomputation, whose parts are alike.

    Exposed collectives of steps that made no entry of the table of overlap come once more.
    """
    made = {(e.target, e.mesh, str(e.batch), name) for (_, name), e in overlap_table().items()}
    found: dict[str, list[float]] = {}
    for row, _ in compared():
        costed = cost_of(row)
        if row["remat"] != "none" or costed is None:
            continue
        terms, compiled = costed.terms, {name: float(row[f"{name}_ms"]) / 1e3 for name in PARTS}
        exposed = (terms.tensor_exposed + terms.gradient_sum) / compiled["exposed"]
        ratios = {
            "products": terms.products / compiled["products"],
            "attention": terms.attention / compiled["kernels"],
            "elementwise, update": (terms.elementwise + terms.update) / (compiled["copies"] + compiled["other"]),
            "exposed": exposed,
        }
        if (row["target"], row["mesh"], row["batch"], row["algorithm"]) not in made:
            ratios["exposed, not an entry"] = exposed
        for name, ratio in ratios.items():
            found.setdefault(name, []).append(ratio)
    yield from found.items()


def main() -> None:
    hidden = "hidden all_gather, reduce_scatter: forward; backward"
    print(f"| target, step | algorithm | planner ms | compiled ms | ratio | {hidden} |")
    for algorithm, entry, ms in entries():
        hidden = (
            f"{100 * s.all_gather:.0f} %, {100 * s.reduce_scatter:.0f} %" for s in (entry.forward, entry.backward)
        )
        step = f"{entry.target}, {entry.mesh}, {entry.layers} layers, batch {entry.batch}"
        compiled = entry.milliseconds
        print(f"| {step} | {algorithm} | {ms:.0f} | {compiled:.0f} | {ms / compiled:.2f} | {'; '.join(hidden)} |")
    before = None
    print("", HEAD, sep="\n")
    for row, ratio in compared():
        step = tuple(row[name] for name in STEP)
        compiled = float(row["ms"])
        named = "" if step == before else step_name(step)
        print(f"| {named} | {name_of(row)} | {ratio * compiled:.0f} | {compiled:.0f} | {ratio:.2f} |")
        before = step
    print("", "| term | steps | planner / compiled | root mean square of the error |\n|---|---|---|---|", sep="\n")
    for name, ratios in term_errors():
        error = math.sqrt(statistics.fmean((ratio - 1) ** 2 for ratio in ratios))
        print(f"| {name} | {len(ratios)} | {min(ratios):.2f} to {max(ratios):.2f} | {100 * error:.1f} % |")


if __name__ == "__main__":
    main()
