"""The table of the shares of collectives that compiled training steps hide, and the planner compared with those steps.

    python -m mstrain.planner.overlap v5p-64 v6e-32    compiles the steps, writes the table
    python -m mstrain.planner.overlap                  prints the planner beside the steps of the table

The table is mstrain/hardware/overlap.toml; entries of other targets stay as they are.
"""

import argparse
import dataclasses
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mstrain.compiler.compile import compile_program
from mstrain.compiler.hlo import parse
from mstrain.compiler.schedule import Schedule, predict
from mstrain.compiler.topology import make_target
from mstrain.hardware import parse_target
from mstrain.hardware.overlap import KINDS, PHASES, TABLE, Entry, Hidden, overlap_table
from mstrain.mesh import parse_mesh
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import ModelPlan, make_plan
from mstrain.models.transformer import Transformer
from mstrain.models.zoo import load_preset
from mstrain.planner.cost import Costed, cost_step
from mstrain.planner.plan import PodPlan
from mstrain.planner.request import PlanRequest
from mstrain.planner.target import pod_of
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import step_program

# Algorithm -> sequences of a step: those of FSDP divide over all devices.
BATCHES = {"fsdp": 32, "megatron": 16, "collective": 16, "meshslice": 16}
SCHEDULED = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-reduce": "reduce_scatter"}


def compile_entry(target: str, algorithm: str, question: argparse.Namespace) -> Entry:
    """Compiles one training step; raises ValueError where it does not fit or is illegal."""
    model = dataclasses.replace(load_preset(question.model), layers=question.layers)
    batch, seq = BATCHES[algorithm], question.seq
    place = make_target(target, question.mesh)
    chip = place.tpu_slice.chip
    plan = make_plan(ParallelConfig(algorithm), model, place.mesh, batch, seq, chip)
    module = Transformer(model, plan, seq, jnp.dtype("bfloat16"), question.remat)
    optimizer = make_optimizer(OptimizerConfig().for_width(model.width))
    program = compile_program(step_program(module, optimizer, batch, 1), place)
    schedule = predict(program)
    forward, backward = hidden_of(schedule, program.text, mean_slices(plan))
    return Entry(
        forward, backward, target, question.mesh, model.name, model.layers, batch, seq, question.remat,
        round(1e3 * schedule.seconds, 1), round(1e3 * schedule.exposed, 1), importlib.metadata.version("libtpu"),
    )  # fmt: skip


def mean_slices(plan: ModelPlan) -> float:
    """The mean slice count of the products of the layers."""
    counts = [product.slices for block, count in plan.groups for product in block.products for _ in range(count)]
    return sum(counts) / len(counts)


def hidden_of(schedule: Schedule, text: str, slices: float = 1.0) -> tuple[Hidden, Hidden]:
    """Shares hidden in the (forward, backward) pass of a training step.

    With slices, all but one of which hide by themselves, they are shares of the one that is left. Collectives of a kind
    that a pass does not have count as exposed.
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
    """Instructions of a compiled step that belong to its backward pass, from the names that JAX gives operations."""
    module = parse(text)
    found = set()
    for body in module.computations.values():
        for i in body:
            inside = [i, *(inner for _, inner in module.within(i))] if i.called else [i]
            if any(re.search(r'op_name="[^"]*transpose\(', each.attributes) for each in inside):
                found.add(i.name)
    return found


def plan_entry(algorithm: str, entry: Entry) -> Costed:
    """The planner's cost of the step of an entry."""
    model = dataclasses.replace(load_preset(entry.model), layers=entry.layers)
    tpu_slice, parallel = parse_target(entry.target), ParallelConfig(algorithm)
    request = PlanRequest(model, pod_of(tpu_slice, tpu_slice.devices), (parallel,), entry.batch, entry.seq)
    costed = cost_step(request, PodPlan.on(parse_mesh(entry.mesh), parallel, 1, entry.remat, "none"))
    assert costed is not None, "a step that was compiled is legal"
    return costed


def comparison() -> Iterator[tuple[str, Entry, Costed]]:
    """(algorithm, entry, planner's cost) of every step of the table."""
    for (_, algorithm), entry in overlap_table().items():
        yield algorithm, entry, plan_entry(algorithm, entry)


def comparison_table() -> Table:
    columns = ("target", "step", "algorithm", "planner ms", "compiled ms", "ratio", "hidden AG, RS forward", "backward")
    table = Table(*columns, title="The planner's cost model beside schedules compiled")
    for algorithm, entry, costed in comparison():
        planned = 1e3 * costed.scheduled_seconds
        table.add_row(
            entry.target, f"{entry.model} {entry.mesh} layers={entry.layers} batch={entry.batch} seq={entry.seq}",
            algorithm, f"{planned:.0f}", f"{entry.milliseconds:.0f}", f"{planned / entry.milliseconds:.2f}",
            *(f"{shares.all_gather:.0%}, {shares.reduce_scatter:.0%}" for shares in (entry.forward, entry.backward)),
        )  # fmt: skip
    return table


def write_entry(algorithm: str, entry: Entry) -> None:
    """Writes an entry into the table."""
    document = tomllib.loads(TABLE.read_text())
    generation = parse_target(entry.target).chip.name
    document.setdefault(generation, {})[algorithm] = dataclasses.asdict(entry)
    lines = [
        "# Shares of collectives that compiled training steps hide (mstrain/hardware/overlap.py), and the steps.",
        "# Made by: python -m mstrain.planner.overlap TARGET --algorithms ALGORITHM, with the target of an entry.",
    ]
    for chip in sorted(document):
        for name, row in document[chip].items():
            lines += ["", f"[{chip}.{name}]", *(f"{key} = {_toml(value)}" for key, value in row.items())]
    TABLE.write_text("\n".join(lines) + "\n")
    overlap_table.cache_clear()


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def main(arguments: list[str]) -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m mstrain.planner.overlap", description=about)
    parser.add_argument("targets", nargs="*", help="pod slices such as v5p-64, one per generation")
    parser.add_argument("--algorithms", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--mesh", default="4x8")
    parser.add_argument("--model", default="gpt3_175b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--remat", default="none")
    chosen = parser.parse_args(arguments)
    try:
        for target in chosen.targets:
            for algorithm in chosen.algorithms:
                write_entry(algorithm, compile_entry(target, algorithm, chosen))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    Console(width=140).print(comparison_table())


if __name__ == "__main__":
    main(sys.argv[1:])
