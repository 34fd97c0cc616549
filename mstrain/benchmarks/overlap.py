"""The table of the shares of collectives that compiled training steps hide, which the planner reads.

    python -m mstrain.benchmarks.overlap target=v5p-64 models=gpt3_175b layers=24 meshes=4x8 batch=16 algorithms=fsdp

compiles the steps and writes their entries into mstrain/hardware/overlap.toml; its keys are those of `bench=step`.
Other entries stay. `python -m tests.planner.steps` prints the planner beside the steps of the table.
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
from mstrain.hardware.overlap import KINDS, PHASES, TABLE, Entry, Hidden, overlap_table
from mstrain.models.plan import ModelPlan
from mstrain.program.dtype import dtype_on

SCHEDULED = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-reduce": "reduce_scatter"}


def compile_entry(case: Case, config: BenchmarkConfig, tpu_slice: TpuSlice) -> Entry:
    """Compiles one training step; raises ValueError where it does not fit or is illegal."""
    place = make_target(tpu_slice, case.mesh)
    plan = plan_case(case, config, place.mesh, tpu_slice.chip)
    program = compile_program(step_work(case, config, plan, dtype_on("tpu", config.dtype)).program, place)
    schedule = predict(program)
    forward, backward = hidden_of(schedule, program.text, mean_slices(plan))
    return Entry(
        forward, backward, config.target or "", config.meshes, case.model.name, case.model.layers, case.batch,
        config.seq, config.remat, round(1e3 * schedule.seconds, 1), round(1e3 * schedule.exposed, 1),
        importlib.metadata.version("libtpu"),
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


def write_entry(algorithm: str, entry: Entry) -> None:
    """Writes an entry into the table."""
    document = tomllib.loads(TABLE.read_text())
    generation = parse_target(entry.target).chip.name
    document.setdefault(generation, {})[algorithm] = dataclasses.asdict(entry)
    lines = [
        "# Shares of collectives that compiled training steps hide (mstrain/hardware/overlap.py), and the steps.",
        "# Made by: python -m mstrain.benchmarks.overlap with the target, model and mesh of an entry (its docstring).",
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
    try:
        config = load(["bench=step", *arguments])
        if config.tpu_slice is None:
            raise ValueError("There is nothing to compile for. Type target=v5p-64, or another TPU slice.")
        for case in make_cases(config, choose_meshes(config, config.tpu_slice)):
            write_entry(case.algorithm, compile_entry(case, config, config.tpu_slice))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
