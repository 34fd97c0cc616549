"""Searches XLA options for an algorithm and a TPU generation by compiling, and reading the predicted times.

    python -m tests.compiler.options v6e-32 --algorithms fsdp meshslice              one layer, minutes per algorithm
    python -m tests.compiler.options v6e-32 --algorithms fsdp --step 8 --vmem 98304  a training step of 8 layers
    python -m tests.compiler.options v5p-64 --algorithms wang --groups "layer scheduler"    one group only

The program is a part of GPT-3 175B, compiled with the options of the chip (`mstrain/hardware/chips.toml`) and a group
of options of `GROUPS`. A group that reduces the time by more than 1 % is kept while further groups are tried. Every
trial is a row of docs/data/options.csv. A low VMEM limit compiles fast but makes products slow, so more of the
collectives is hidden. Before a group is added to the table of chips, it therefore has to reduce the time of a step at
the VMEM limit of the chip, too.
"""

import argparse
import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from mstrain.compiler.compile import DoesNotFit, compile_program
from mstrain.compiler.schedule import predict
from mstrain.compiler.topology import Target, make_target
from mstrain.gemm import ALGORITHMS, grid_of
from mstrain.hardware import compiler_options
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.models.zoo import load_preset
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.parts import layer_program
from mstrain.program.program import Program
from mstrain.program.step import step_program
from tests.docs.rows import replace_rows

MODEL, SEQ, MESH = "gpt3_175b", 2048, "4x8"
GAIN = 0.99  # a group is kept if it reduces the time by more than this factor
VMEM = "xla_tpu_scoped_vmem_limit_kib"
TABLE = Path(__file__).parents[2] / "docs/data/options.csv"
SEARCH = ("target", "algorithm", "program", "vmem_kib")  # columns that every row of one search shares

# From the recipes of MaxText and tpu-recipes for v5p, v6e and tpu7x, as far as libtpu accepts them.
_AGGREGATOR = {"xla_tpu_enable_sparse_core_collective_aggregator": True}
GROUPS = {
    "SparseCore queue": {
        **_AGGREGATOR,
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,
        "xla_tpu_use_single_sparse_core_for_all_gather_offload": True,
    },
    "one collective a SparseCore": {
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": False,
        "xla_tpu_enable_concurrent_sparse_core_offloading": True,
        "xla_max_concurrent_async_all_gathers": 2,
        "xla_max_concurrent_async_reduce_scatters": 2,
    },
    "layer scheduler": {
        **_AGGREGATOR,
        "xla_tpu_enable_latency_hiding_layer_scheduler": True,
        "xla_tpu_enable_layer_scheduler_for_dependent_collectives": True,
        "xla_tpu_enable_multi_compute_overlap_in_layer_scheduler": False,
        "xla_tpu_scheduler_percent_shared_memory_limit": 150,
    },
    "gathers stay gathers": {"xla_tpu_prefer_async_allgather_to_allreduce": True},
    "latency multipliers": {
        "xla_tpu_sparse_core_all_gather_latency_multiplier": 1,
        "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": 3,
    },
    "no collective matmul": {
        "xla_tpu_all_gather_collective_matmul_mode": "none",
        "xla_tpu_reduce_scatter_collective_matmul_mode": "none",
    },
    "windowed einsum, all": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 0},
    "windowed einsum, none": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
}
# The compiler partitions the products of gspmd only; others have the same schedule with and without these.
_PARTITIONED = ("no collective matmul", "windowed einsum, all", "windowed einsum, none")
ONLY: dict[str, tuple[str, ...]] = dict.fromkeys(_PARTITIONED, ("gspmd",))


@dataclasses.dataclass(frozen=True)
class Trial:
    """One compilation with the options of the chip and of `groups`: predicted seconds, their range, and collectives.

    `problem` is the error message if there is no result.
    """

    groups: tuple[str, ...]
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    exposed: float | None = None
    blocking: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.seconds is None or self.low is None or self.high is None or self.exposed is None:
            return self.problem
        seconds, low, high, exposed = (f"{1e3 * x:.2f}" for x in (self.seconds, self.low, self.high, self.exposed))
        return f"{seconds} ms ({low}, {high}), exposed {exposed} ms, {self.blocking} blocking"


def trial_program(algorithm: str, target: Target, layers: int = 0) -> Program:
    """A training step of `layers` layers, or for 0 one layer, with half a sequence per device (FSDP: a whole one)."""
    model, devices, dtype = load_preset(MODEL), target.mesh.size, jnp.dtype("bfloat16")
    model = dataclasses.replace(model, layers=layers or 1)
    batch = max(devices // 2, grid_of(algorithm, target.mesh).num_rows)
    plan = make_plan(ParallelConfig(algorithm), model, target.mesh, batch, SEQ, target.tpu_slice.chip)
    if not layers:
        return layer_program(model, plan.groups[0][0], batch * SEQ, SEQ, dtype)
    optimizer = make_optimizer(OptimizerConfig().for_width(model.width))
    return step_program(Transformer(model, plan, SEQ, dtype), optimizer, batch)


def compile_trial(
    groups: tuple[str, ...], program: Program, target: Target, vmem: int, dump: str | None = None
) -> Trial:
    """Compiles the program with the chip's options and those of `groups`, and reads its schedule."""
    options = compiler_options(target.tpu_slice.chip) | {VMEM: vmem}
    for group in groups:
        options |= GROUPS[group]
    try:
        schedule = predict(compile_program(program, target, options, dump))
    except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
        return Trial(groups, problem=str(error).splitlines()[0][:200])
    return Trial(groups, schedule.seconds, *schedule.bounds, schedule.exposed, schedule.blocking)


def search(attempt: Callable[[tuple[str, ...]], Trial], names: tuple[str, ...]) -> Iterator[tuple[Trial, bool]]:
    """(trial, whether its groups are kept) of every trial. The first one has no groups; without its result, it ends."""
    best = attempt(())
    yield best, best.seconds is not None
    for name in names if best.seconds is not None else ():
        trial = attempt((*best.groups, name))
        kept = trial.seconds is not None and best.seconds is not None and trial.seconds < GAIN * best.seconds
        yield trial, kept
        best = trial if kept else best


def groups_of(algorithm: str, chosen: Collection[str] = tuple(GROUPS)) -> tuple[str, ...]:
    """Those of the `chosen` groups that change programs of `algorithm`."""
    return tuple(name for name in GROUPS if name in chosen and (name not in ONLY or algorithm in ONLY[name]))


def write_rows(search: dict[str, str], trials: list[tuple[Trial, bool]], table: Path = TABLE) -> None:
    """Replaces the rows of one search, which has the columns `SEARCH`, in the table."""
    rows, (_, *fields) = [], [field.name for field in dataclasses.fields(Trial)]
    for trial, kept in trials:
        values = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in dataclasses.asdict(trial).items()}
        version = importlib.metadata.version("libtpu")
        rows.append(
            {**search, **values, "groups": " + ".join(trial.groups), "kept": str(kept).lower(), "libtpu": version}
        )
    replace_rows(table, [*SEARCH, "groups", "kept", *fields, "libtpu"], SEARCH, rows, near=SEARCH[:2])


def main(arguments: list[str]) -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.compiler.options", description=about)
    parser.add_argument("targets", nargs="+", help="pod slices such as v6e-32, one per generation")
    parser.add_argument("--mesh", default=MESH)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    parser.add_argument("--step", type=int, default=0, metavar="LAYERS", help="a training step instead of one layer")
    parser.add_argument("--vmem", type=int, default=16384, metavar="KIB", help="scoped VMEM limit of the compiler")
    parser.add_argument("--dump", help="folder for the compiled programs as text")
    chosen = parser.parse_args(arguments)
    try:
        for target in (make_target(name, chosen.mesh) for name in chosen.targets):
            for algorithm in chosen.algorithms:
                _search_one(target, algorithm, chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _search_one(target: Target, algorithm: str, chosen: argparse.Namespace) -> None:
    program, part = trial_program(algorithm, target, chosen.step), f"step of {chosen.step}" if chosen.step else "layer"
    part += f" on {chosen.mesh}" if chosen.mesh != MESH else ""

    def attempt(groups: tuple[str, ...]) -> Trial:
        name = " ".join((target.tpu_slice.name, algorithm, part, *groups))
        return compile_trial(groups, dataclasses.replace(program, name=name), target, chosen.vmem, chosen.dump)

    columns: dict[str, str] = dict(zip(SEARCH, (target.tpu_slice.name, algorithm, part, str(chosen.vmem)), strict=True))
    trials = []
    for trial, kept in search(attempt, groups_of(algorithm, chosen.groups)):
        print(f"{target.tpu_slice.name} {algorithm} {' + '.join(trial.groups) or 'chip'}: {trial}", flush=True)
        trials.append((trial, kept))
        write_rows(columns, trials)


if __name__ == "__main__":
    main(sys.argv[1:])
