"""How much of the exchange of tokens overlaps with compute in a compiled layer with experts.

    python -m tests.compiler.exchanged v5p-16 expert8-row1-col1 collective slices=2 batch=8 [OPTION=VALUE ...]

compiles one block of `model` (mixtral_8x7b) with its gradients, for `batch` sequences of 4096 tokens. For each kind of
collective and its mesh axes it prints the number of collectives, how many are asynchronous, their time, and the
fraction that overlaps with compute. `dump=FOLDER` writes the program to a folder. `margin=8` allocates buffers for
eight times an even load. Other keys are XLA options.
"""

import dataclasses
import sys
from unittest import mock

import jax.numpy as jnp

from mstrain.compiler import compile_program, make_target, predict
from mstrain.compiler.compile import Compiled
from mstrain.gemm import expert_exchange
from mstrain.hardware import compiler_options
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.zoo import load_preset
from mstrain.program.parts import layer_program
from tests.compiler.arguments import read_arguments
from tests.compiler.shares import describe, grouped

SEQ = 4096


@dataclasses.dataclass(frozen=True)
class Keys:
    """What is compiled: `slices` of the exchange, `margin`, the size of its buffers relative to an even load, and the
    folder `dump` for the program."""

    model: str = "mixtral_8x7b"
    batch: int = 8
    slices: str = "auto"
    margin: float = expert_exchange.MARGIN
    dump: str | None = None


def compile_layer(target: str, mesh: str, algorithm: str, keys: Keys, options) -> Compiled:
    place = make_target(target, mesh)
    config = dataclasses.replace(load_preset(keys.model), layers=1)
    parallel, chip = ParallelConfig(algorithm, expert_slices=keys.slices), place.tpu_slice.chip
    plan = make_plan(parallel, config, place.mesh, keys.batch, SEQ, chip)
    program = layer_program(config, plan.groups[0][0], keys.batch * SEQ, SEQ, jnp.bfloat16)
    with mock.patch.object(expert_exchange, "MARGIN", keys.margin):
        return compile_program(program, place, compiler_options(chip, plan.algorithm) | options, keys.dump)


def main(target: str, mesh: str, algorithm: str, *arguments: str) -> None:
    keys, options = read_arguments(Keys, arguments)
    program = compile_layer(target, mesh, algorithm, keys, options)
    schedule = predict(program)
    print(f"{keys.model} on {target} {mesh} {algorithm} batch={keys.batch} slices={keys.slices} {options or ''}: "
          f"{1e3 * schedule.seconds:.2f} ms, {1e3 * schedule.exposed:.2f} exposed, {program.memory}, "
          f"{program.seconds:.0f} s to compile")  # fmt: skip
    for (kind, axes), group in grouped(schedule.transfers, lambda t: (t.collective.kind, t.collective.axes)).items():
        print(f"{kind} along {', '.join(axes)}: {describe(group)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
