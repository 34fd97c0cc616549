"""How much of the gathers and sums over copies runs beside compute in a compiled step of `shard=parameters`.

    python -m tests.compiler.prefetched v5p-64 data4-row1-col8 megatron width=4096 layers=4 [OPTION=VALUE ...]

compiles the step of a small GPT with remat=full, one sequence of 2048 tokens a device, and prints for each pass and
kind of collective along `data`, those in the scans over layers and the others: their number, how many are asynchronous,
the share of their time beside compute, and that with neither compute nor a collective along another axis beside it.
`dump=FOLDER` keeps the program; other keys are XLA options.
"""

import collections
import dataclasses
import sys

import jax.numpy as jnp

from mstrain.compiler import compile_program, make_target, predict
from mstrain.compiler.compile import Compiled
from mstrain.compiler.replay import Transfer
from mstrain.compiler.schedule import Schedule
from mstrain.hardware import compiler_options
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import step_program
from tests.compiler.arguments import read_arguments
from tests.compiler.shares import describe, grouped, seconds
from tests.planner.overlap import backward_names

SEQ, VOCABULARY = 2048, 512


@dataclasses.dataclass(frozen=True)
class Keys:
    """Sizes of the model, and the folder in which the program is left."""

    width: int = 4096
    layers: int = 4
    dump: str | None = None


def compile_step(target: str, mesh: str, algorithm: str, keys: Keys, options) -> Compiled:
    place = make_target(target, mesh)
    width = keys.width
    model = ModelConfig(layers=keys.layers, width=width, heads=width // 128, position="alibi", vocab_size=VOCABULARY)
    batch = place.mesh.size
    plan = make_plan(ParallelConfig(algorithm), model, place.mesh, batch, SEQ, place.tpu_slice.chip, shard="parameters")
    module = Transformer(model, plan, SEQ, jnp.bfloat16, "full")
    optimizer = make_optimizer(OptimizerConfig().for_width(width))
    step = step_program(module, optimizer, batch)
    chosen = compiler_options(place.tpu_slice.chip, plan.algorithm) | options
    return compile_program(step, place, chosen, keys.dump)


def along_data(schedule: Schedule, text: str) -> dict[tuple, list[Transfer]]:
    """The collectives along `data` by pass, kind and place; what runs more than once is in a scan."""
    backward, times = backward_names(text), collections.Counter(t.name for t in schedule.transfers)

    def key(t: Transfer) -> tuple[str, str, str]:
        place = "in scans" if times[t.name] > 1 else "once"
        return ("forward", "backward")[t.name in backward], t.collective.kind, place

    return grouped((t for t in schedule.transfers if t.collective.axes == ("data",)), key)


def busy_times(schedule: Schedule) -> list[tuple[float, float]]:
    """Disjoint intervals with compute or with a collective along another axis than `data`."""
    line = schedule.timeline
    busy = [(begin, begin + size) for lane, begin, size in zip(line.lane, line.start, line.duration) if lane == 0]
    return merged(busy + [(t.begin, t.end) for t in schedule.transfers if t.collective.axes != ("data",)])


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def main(target: str, mesh: str, algorithm: str, *arguments: str) -> None:
    keys, options = read_arguments(Keys, arguments)
    program = compile_step(target, mesh, algorithm, keys, options)
    schedule = predict(program)
    print(f"{target} {mesh} {algorithm} width={keys.width} layers={keys.layers}: {1e3 * schedule.seconds:.2f} ms, "
          f"{1e3 * schedule.exposed:.2f} exposed, {program.seconds:.0f} s to compile")  # fmt: skip
    busy = busy_times(schedule)
    for key, group in along_data(schedule, program.text).items():
        beside = sum(max(0.0, min(end, t.end) - max(begin, t.begin)) for t in group for begin, end in busy)
        print(f"{' '.join(key)}: {describe(group)}, {1 - beside / seconds(group):.0%} alone")


if __name__ == "__main__":
    main(*sys.argv[1:])
