"""Writes mstrain/hardware/overlap.toml: which fraction of collectives compiled training steps hide behind compute.

    python -m tests.planner.overlap target=v5p-64 models=gpt3_175b layers=24 meshes=4x8 batch=16 algorithms=fsdp

compiles the steps and writes their entries; other entries are kept. The keys are those of `bench=step`. The planner
reads the file. `python -m tests.planner.steps` compares the planner with the steps of the file.

A schedule gives the fraction of the time of each kind of collective that overlaps with compute. This fraction depends
on the size of the step: if communication takes longer than the products, some of it is exposed in any schedule. The
file therefore has fractions of the time that can be hidden (`mstrain.hardware.overlap.Hidden`). All fractions of a step
are scaled such that the cost model predicts the exposed time of the schedule, which counts time in which several
collectives are exposed once.
"""

import dataclasses
import importlib.metadata
import re
import sys
import tomllib

from mstrain.benchmarks.cases import Case, make_cases, plan_case
from mstrain.benchmarks.config import BenchmarkConfig, load
from mstrain.benchmarks.predicted import choose_meshes
from mstrain.benchmarks.programs import step_work
from mstrain.compiler.compile import compile_program
from mstrain.compiler.hlo import parse
from mstrain.compiler.schedule import Schedule, predict
from mstrain.compiler.topology import make_target
from mstrain.hardware import TpuSlice, parse_target
from mstrain.hardware.constants import Constants
from mstrain.hardware.overlap import KINDS, PHASES, TABLE, Entry, Hidden, overlap_table
from mstrain.hardware.pod import pod_of
from mstrain.mesh import shape_of
from mstrain.models.plan import ModelPlan
from mstrain.parallel.product_cost import GEMMS, communication_terms, pass_costs
from mstrain.planner.cost import Step, cost_step
from mstrain.planner.plan import PodPlan, Product
from mstrain.planner.request import PlanRequest
from mstrain.program.dtype import dtype_on

Shares = tuple[Hidden, Hidden]  # in the forward and in the backward pass
SCHEDULED = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-reduce": "reduce_scatter"}


def compile_entry(case: Case, config: BenchmarkConfig, tpu_slice: TpuSlice) -> Entry:
    """Compiles one training step. Raises ValueError if it is illegal or does not fit in memory."""
    place = make_target(tpu_slice, case.mesh)
    dtype = dtype_on("tpu", config.dtype)
    plan = plan_case(case, config, place.mesh, tpu_slice, dtype)
    program = compile_program(step_work(case, config, plan, dtype).program, place)
    schedule = predict(program)
    if config.remat != "none":
        raise ValueError(f"remat={config.remat}: overlap.toml has steps without recomputation. Type remat=none.")
    shape = shape_of(place.mesh)
    request = PlanRequest(
        case.model, pod_of(tpu_slice, tpu_slice.devices), (config.parallel(case.algorithm),), case.batch, config.seq
    )
    costed = cost_step(request, PodPlan.on(shape, request.parallel[0], case.accumulate, config.remat, config.shard))
    if costed is None:
        raise ValueError(f"The cost model does not know {case.algorithm} on {shape}.")
    read = hidden_of(schedule, program.text, mean_slices(plan))
    forward, backward = fit_shares(costed.step, read, schedule.exposed)
    return Entry(
        forward, backward, config.target or "", config.meshes, case.model.name, case.model.layers, case.batch,
        config.seq, config.remat, round(1e3 * schedule.seconds, 1), round(1e3 * schedule.exposed, 1),
        importlib.metadata.version("libtpu"),
    )  # fmt: skip


def fit_shares(step: Step, read: Shares, exposed: float) -> Shares:
    """Hidden fractions with which the cost model predicts `exposed` seconds of exposed communication for `step`.

    Args:
      read: hidden fractions of the time of collectives, from the schedule; 1 minus each is scaled by the same factor.

    If the cost model predicts more than `exposed` seconds even with all fractions at 1, the result is the smallest
    fractions with which it predicts at most 2 % more than that minimum.
    """
    at, microbatches = step.at, step.plan.microbatches
    rates = [(product, *at.rates(product)) for product in (*step.products.block, step.products.head)]
    stretch = _stretch(rates)

    def scaled(factor: float) -> Shares:
        forward, backward = (
            Hidden(**{
                kind: round(min(1.0, max(0.0, (1 - factor * (1 - getattr(shares, kind))) * stretch[phase, kind])), 3)
                for kind in KINDS
            })
            for phase, shares in zip(PHASES, read)
        )  # fmt: skip
        return forward, backward

    def seconds(factor: float) -> float:
        costs = [sum(c.exposed for c in pass_costs(p.layout, p.slices, rate, scaled(factor))) for p, _, rate in rates]
        return microbatches * (step.request.model.layers * sum(costs[:-1]) + costs[-1])

    goal, low, high = max(exposed, 1.02 * seconds(0.0)), 0.0, 1.5
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if seconds(middle) > goal else (middle, high)
    return scaled(low)


def _stretch(rates: list[tuple[Product, tuple[float, ...], Constants]]) -> dict[tuple[str, str], float]:
    """For each pass and kind of collective, its time / the time that can be hidden."""
    total = dict.fromkeys(((phase, kind) for phase in PHASES for kind in KINDS), 0.0)
    most = dict(total)
    for product, (first, *others), rate in rates[:-1]:  # without the output projection
        for term in communication_terms(product.layout, rate):
            ahead = term.gemm == product.layout.dataflow.upper()
            each = (term.traffic_col, term.latency_col), (term.traffic_row, term.latency_row)
            for kind, (traffic, latency) in zip(GEMMS[term.gemm], each):
                time, key = traffic / product.slices + latency, (PHASES[not ahead], kind)
                total[key] += time
                most[key] += min(time, first if ahead else sum(others))
    return {key: total[key] / most[key] if most[key] else 1.0 for key in total}


def mean_slices(plan: ModelPlan) -> float:
    """Mean slice count of the products of all layers."""
    counts = [product.slices for block, count in plan.groups for product in block.products for _ in range(count)]
    return sum(counts) / len(counts)


def hidden_of(schedule: Schedule, text: str, slices: float = 1.0) -> Shares:
    """Hidden fractions of collectives in the (forward, backward) pass of a training step.

    With several `slices`, all but one of the slices overlap within the product, and the fractions are those of the
    remaining one. The fraction of a kind of collective that a pass does not have is 0.
    """
    transposed = backward_names(text)
    total = dict.fromkeys(((phase, kind) for phase in PHASES for kind in KINDS), 0.0)
    shown = dict(total)
    for transfer in schedule.transfers:
        if kind := SCHEDULED.get(transfer.collective.kind):
            key = PHASES[transfer.name in transposed], kind
            total[key] += transfer.end - transfer.begin
            shown[key] += transfer.end - transfer.begin - transfer.hidden
    share = {key: max(0.0, 1 - slices * shown[key] / total[key]) if total[key] else 0.0 for key in total}
    forward, backward = (Hidden(*(round(share[phase, kind], 3) for kind in KINDS)) for phase in PHASES)
    return forward, backward


def backward_names(text: str) -> set[str]:
    """Names of the instructions of the backward pass of a compiled step, found by the operation names of JAX."""
    module = parse(text)
    found = set()
    for body in module.computations.values():
        for i in body:
            inside = [i, *(inner for _, inner in module.within(i))] if i.called else [i]
            if any(re.search(r'op_name="[^"]*transpose\(', each.attributes) for each in inside):
                found.add(i.name)
    return found


def write_entry(algorithm: str, entry: Entry) -> None:
    """Writes an entry of overlap.toml."""
    document = tomllib.loads(TABLE.read_text())
    generation = parse_target(entry.target).chip.name
    document.setdefault(generation, {})[algorithm] = dataclasses.asdict(entry)
    lines = [
        "# Shares of what can be hidden of collectives, in compiled training steps (mstrain/hardware/overlap.py).",
        "# Made by: python -m tests.planner.overlap with the target, model and mesh of an entry (its docstring).",
        "# Scaled to all compiled steps by: python -m tests.planner.rescale.",
    ]
    for chip in sorted(document):
        for name, row in document[chip].items():
            lines += ["", f"[{chip}.{name}]", *(f"{key} = {_toml(value)}" for key, value in row.items())]
    TABLE.write_text("\n".join(lines) + "\n")
    overlap_table.cache_clear()


def _toml(value) -> str:
    if isinstance(value, dict):
        told = {key: inner for key, inner in value.items() if key in KINDS or inner}
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in told.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def main(arguments: list[str]) -> None:
    try:
        config = load(["bench=step", *arguments])
        if config.tpu_slice is None:
            raise ValueError("target= is missing. Type target=v5p-64, or another TPU slice.")
        for case in make_cases(config, choose_meshes(config, config.tpu_slice)):
            write_entry(case.algorithm, compile_entry(case, config, config.tpu_slice))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
