"""Overlap of MeshSlice in schedules of the TPU compiler: a table of the three products of one projection.

    python -m tests.compiler.study v5p-64 v6e-32 --slices 4 8

The default sizes are those of the first projection of the MLP of GPT-3 175B with 65536 tokens on 4x8 devices (MeshSlice
paper, section 4). All figures are predicted from compiled schedules. No TPU is needed.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mstrain.compiler.compile import Compiled, compile_program
from mstrain.compiler.schedule import CompiledSchedule, predict
from mstrain.compiler.topology import Target, make_target
from mstrain.gemm import Flows, Plan, grid_of
from mstrain.models.plan import chip_lowering
from mstrain.program.program import Program, abstract

COLUMNS = (
    "target", "flow", "S", "overlapped", "hidden", "blocking", "copies / GeMM", "GeMM / Collective",
    "temporaries / Collective", "exposed", "predicted ms (low, high)", "Collective ms (low, high)",
)  # fmt: skip


def flow_program(plan: Plan, tokens: int, in_dim: int, out_dim: int) -> Program:
    """The product of a projection with the dataflow `plan.dataflow`, in bf16.

    os is Y = X W, ls is dX = dY W^T, rs is dW = X^T dY, with X [tokens, in_dim] and Y [tokens, out_dim].
    """
    flow, flows, spec = plan.dataflow, Flows(plan), plan.grid.weight_spec
    x, w, y = (tokens, in_dim), (in_dim, out_dim), (tokens, out_dim)
    operands = {"os": (x, w), "ls": (y, w), "rs": (x, y)}[flow]
    arguments = tuple(abstract(shape, jnp.bfloat16, plan.grid.mesh, spec) for shape in operands)
    function = jax.jit(flows.on_mesh(getattr(flows, flow), (spec, spec), spec))
    return Program(f"{plan.algorithm} {flow} S={plan.slices}", function, arguments, plan.program)


def compile_flow(
    algorithm: str, flow: str, slices: int, target: Target, sizes: tuple[int, ...], **keywords
) -> Compiled:
    """One of the three products of a projection of `sizes` (tokens, features in, features out)."""
    plan = Plan(algorithm, flow, grid_of(algorithm, target.mesh), slices, chip_lowering(target.tpu_slice.chip))
    return compile_program(flow_program(plan, *sizes), target, **keywords)


def row(
    flow: str, slices: int, target: Target, sizes: tuple[int, ...], collective: CompiledSchedule, **keywords
) -> tuple[str, ...]:
    """One line of the table: MeshSlice in `slices` slices, compared with `collective`, the same product unsliced."""
    program = compile_flow("meshslice", flow, slices, target, sizes, **keywords)
    s = predict(program)
    return (
        target.tpu_slice.name, flow, str(slices), f"{s.overlapped} of {len(s.transfers)}",
        "n/a" if s.hidden is None else f"{s.hidden:.0%}", str(s.blocking),
        f"{s.move_fraction:.1%}", f"{s.cycles['gemm'] / collective.cycles['gemm']:.3f}",
        f"{s.memory.temporaries / collective.memory.temporaries:.2f}", f"{s.exposed_fraction:.1%}",
        milliseconds(s), milliseconds(collective),
    )  # fmt: skip


def milliseconds(schedule: CompiledSchedule) -> str:
    """`6.10 (5.97, 6.41)`: predicted, and the range that the unknown constants allow."""
    low, high = schedule.bounds
    return f"{1e3 * schedule.seconds:.2f} ({1e3 * low:.2f}, {1e3 * high:.2f})"


def main(arguments: list[str]) -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.compiler.study", description=about)
    parser.add_argument("targets", nargs="+", help="pod slices such as v5p-64 or tpu7x:2x2x4")
    parser.add_argument("--mesh", default="4x8")
    parser.add_argument("--slices", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--flows", nargs="+", default=["os", "ls", "rs"])
    parser.add_argument("--sizes", default="65536x12288x49152", help="tokens x features in x features out")
    parser.add_argument("--dump", help="folder for the scheduled programs")
    chosen = parser.parse_args(arguments)
    sizes = tuple(map(int, chosen.sizes.split("x")))
    console = Console()
    table = Table(*COLUMNS, title=f"{chosen.sizes} in bf16 on {chosen.mesh}, read from compiled schedules")
    try:
        for name in chosen.targets:
            target = make_target(name, chosen.mesh)
            for flow in chosen.flows:
                collective = predict(compile_flow("collective", flow, 1, target, sizes))
                for slices in chosen.slices:
                    line = row(flow, slices, target, sizes, collective, dump=chosen.dump)
                    table.add_row(*line)
                    print(*line, sep=" | ", file=sys.stderr)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
