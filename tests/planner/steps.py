"""Compares the planner's predicted times with compiled steps.

    python -m tests.planner.steps

Prints the three tables of docs/planning.md: the steps of mstrain/hardware/overlap.toml, those of docs/data/steps.csv
that the cost model can price, and the errors of the terms of the latter.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping

from mstrain.gemm import MESHSLICE, same_program
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.overlap import Entry, overlap_table
from mstrain.mesh import parse_mesh
from mstrain.models.parallel import ParallelConfig
from mstrain.models.zoo import load_preset
from mstrain.planner.cost import Costed, cost_plan, cost_step
from mstrain.planner.memory import stage_parameters
from mstrain.planner.plan import PodPlan, Product, Products, plan_products
from mstrain.planner.request import PlanRequest
from tests.docs.steps import CURRENT, STEP, name_of, read_steps, step_name

PARTS = ("products", "kernels", "copies", "other", "exposed")  # columns of docs/data/steps.csv: parts of a step
CHOICES = (*STEP, "algorithm", "mesh", "shard")
HEAD = "| step | algorithm, mesh | planner ms | compiled ms | ratio |\n|---|---|---|---|---|"


def request_and_plan(row: Mapping) -> tuple[PlanRequest, PodPlan]:
    """What the planner is asked for a compiled step, and its plan with one microbatch."""
    model = dataclasses.replace(load_preset(row["model"]), layers=int(row["layers"]))
    parallel = ParallelConfig(row["algorithm"])
    request = PlanRequest(model, find_pod(row["target"]), (parallel,), int(row["batch"]), int(row["seq"]))
    return request, PodPlan.on(parse_mesh(row["mesh"]), parallel, 1, row["remat"], row["shard"])


def automatic_products(request: PlanRequest, plan: PodPlan) -> Products:
    """The products of a step with the dataflows and slice counts that the tuner chooses."""
    products = plan_products(request, plan)
    assert isinstance(products, Products), products
    return products


def cost_of(row: Mapping) -> Costed | None:
    """The planner's cost of a compiled step; None if it cannot price the step."""
    request, plan = request_and_plan(row)
    if cost_step(request, plan) is None:
        return None
    return cost_plan(request, plan, as_compiled(automatic_products(request, plan), row.get("plan", "")))


def planned(row: Mapping) -> float | None:
    """The planner's milliseconds of a step, without stragglers; None if it cannot price the step."""
    costed = cost_of(row)
    return 1e3 * costed.scheduled_seconds if costed else None


def as_compiled(products: Products, text: str) -> Products:
    """The products with the dataflows and slice counts of a compiled plan such as `os ls os ls S=4 3 4 4`."""
    flows, _, counts = text.partition(" S=")
    if not counts:
        return products

    def compiled(product: Product, flow: str, count: int) -> Product:
        layout = dataclasses.replace(product.layout, dataflow=flow)
        program = same_program(MESHSLICE, flow, layout.cols, count)
        return dataclasses.replace(product, layout=layout, slices=count, program=program)

    ((block, share),) = products.groups
    block = tuple(compiled(*each) for each in zip(block, flows.split(), map(int, counts.split())))
    return dataclasses.replace(products, groups=((block, share),))


def exposed_seconds(costed: Costed) -> float:
    """Seconds of exposed communication that the planner predicts for a step of one stage, as a schedule counts them."""
    terms, (stage,), step = costed.terms, costed.stages, costed.step
    held = stage_parameters(step.request.model, stage.holds, True, True).over(costed.plan.tensor)
    return terms.tensor_exposed + stage.repeated.exposed + terms.gradient_sum - step.copies(costed.plan, held)


def entries() -> Iterator[tuple[str, Entry, float]]:
    """(algorithm, entry, the planner's milliseconds) of every entry of mstrain/hardware/overlap.toml."""
    plans = {tuple(row[name] for name in CHOICES): row["plan"] for row in read_steps()}
    for (_, algorithm), entry in overlap_table().items():
        row = {**dataclasses.asdict(entry), "algorithm": algorithm, "shard": "none"}
        found = planned({**row, "plan": plans[tuple(str(row[name]) for name in CHOICES)]})
        assert found is not None, "a step that was compiled is legal"
        yield algorithm, entry, found


def compared() -> Iterator[tuple[dict[str, str], float]]:
    """(row of docs/data/steps.csv, the planner's milliseconds over the compiled ones).

    Of steps that differ only in compiler options, the fastest is compared; it has the options of the table of chips.
    """
    best: dict[tuple, dict[str, str]] = {}
    for row in read_steps():
        key = tuple(row[name] for name in CHOICES)
        if float(row["ms"]) < float(best[key]["ms"] if key in best else math.inf):
            best[key] = row
    for row in best.values():
        if found := planned(row):
            yield row, found / float(row["ms"])


def term_errors() -> Iterator[tuple[str, list[float], list[float]]]:
    """(term, planner minus compiled, compiled) of steps compiled with the current code, as fractions of their time.

    The last term is exposed communication of only those steps that are not an entry of overlap.toml.
    """
    made = {(e.target, e.mesh, str(e.batch), name) for (_, name), e in overlap_table().items()}
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row, _ in compared():
        if row["program"] != CURRENT:
            continue
        costed = cost_of(row)
        assert costed, "it is priced above"
        terms, again = costed.terms, costed.stages[0].repeated
        compiled = {name: float(row[f"{name}_ms"]) / 1e3 for name in PARTS}
        planned = {
            "products": (terms.products + again.gemm, compiled["products"]),
            "attention": (terms.attention + again.attention, compiled["kernels"]),
            "exposed": (exposed_seconds(costed), compiled["exposed"]),
        }
        beside = costed.scheduled_seconds - sum(ours for ours, _ in planned.values())
        planned["elementwise, update"] = beside, compiled["copies"] + compiled["other"]
        if (row["target"], row["mesh"], row["batch"], row["algorithm"]) not in made:
            planned["exposed, steps not in `overlap.toml`"] = planned["exposed"]
        for name, (ours, theirs) in planned.items():
            differences, values = found.setdefault(name, ([], []))
            differences.append(1e3 * (ours - theirs) / float(row["ms"]))
            values.append(1e3 * theirs / float(row["ms"]))
    yield from ((name, *columns) for name, columns in found.items())


def main() -> None:
    hidden = "hidden part of all_gather, reduce_scatter: forward; backward"
    print(f"| target, step | algorithm | planner ms | compiled ms | ratio | {hidden} |\n|---|---|---|---|---|---|")
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
    print("", "| term | steps | fraction of step time | RMS error, of step time | RMS error, of the term |", sep="\n")
    print("|---|---|---|---|---|")
    for name, differences, values in term_errors():
        error, size = root_mean_square(differences), root_mean_square(values)
        shares = f"{100 * min(values):.0f} to {100 * max(values):.0f} %"
        print(f"| {name} | {len(values)} | {shares} | {100 * error:.1f} % | {100 * error / size:.0f} % |")


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


if __name__ == "__main__":
    main()
