"""How much of the all_gathers and reduce_scatters over replicas overlaps in a compiled step of `shard=parameters`.

    python -m tests.compiler.prefetched v5p-64 data4-row1-col8 megatron width=4096 layers=4 [OPTION=VALUE ...]

compiles the step of a small GPT with remat=full and one sequence of 2048 tokens per device. For each pass and kind of
collective along `data`, within the scan over layers and outside of it, it prints the number of collectives, how many
are asynchronous, their time, the fraction that overlaps with compute, and the fraction that overlaps neither with
compute nor with collectives along other axes. `dump=FOLDER` writes the program to a folder; other keys are XLA options.
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
    """Sizes of the model, and the folder `dump` for the program."""

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
    """The collectives along `data` by pass, kind and position. An instruction that runs several times is in a scan."""
    backward, times = backward_names(text), collections.Counter(t.name for t in schedule.transfers)

    def key(t: Transfer) -> tuple[str, str, str]:
        place = "in scans" if times[t.name] > 1 else "outside"
        return ("forward", "backward")[t.name in backward], t.collective.kind, place

    return grouped((t for t in schedule.transfers if t.collective.axes == ("data",)), key)


def busy_times(schedule: Schedule) -> list[tuple[float, float]]:
    """Disjoint intervals in which the device computes or has a collective along an axis other than `data`."""
    line = schedule.timeline
    busy = [(begin, begin + size) for lane, begin, size in zip(line.lane, line.start, line.duration) if lane == 0]
    return merged(busy + [(t.begin, t.end) for t in schedule.transfers if t.collective.axes != ("data",)])


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals with the same union."""
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
        overlap = sum(max(0.0, min(end, t.end) - max(begin, t.begin)) for t in group for begin, end in busy)
        alone = 1 - overlap / seconds(group)
        print(f"{' '.join(key)}: {describe(group)}, {alone:.0%} overlaps with nothing")


if __name__ == "__main__":
    main(*sys.argv[1:])
