"""A search over XLA options by algorithm and TPU generation. It compiles, and reads the schedules.

    python -m mstrain.compiler.options v5p-64 v6e-32 tpu7x-32 --algorithms fsdp meshslice

The program is one layer of GPT-3 175B, forward and backward, with the options of the chip
(`mstrain/hardware/chips.toml`) and a group of `GROUPS`. A group that makes it faster by more than 1 % is kept and the
following groups are tried beside it. Every trial is a row of docs/data/options.csv. Estimates of products are rough at
the VMEM limit of `RANKING`, so a group that wins is compiled once more as a whole step, at the chip's limit, before it
goes into the table of chips.
"""

import argparse
import csv
import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from mstrain.compiler.compile import DoesNotFit, compile_program
from mstrain.compiler.schedule import predict
from mstrain.compiler.topology import Target, make_target
from mstrain.gemm import ALGORITHMS
from mstrain.hardware import compiler_options
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.zoo import load_preset
from mstrain.program.parts import layer_program
from mstrain.program.program import Program

MODEL, SEQ = "gpt3_175b", 2048
GAIN = 0.99  # a group is kept if it reduces the time to less than this share
RANKING = {"xla_tpu_scoped_vmem_limit_kib": 16384}  # compiles several times faster than the limits of the chips
TABLE = Path(__file__).parents[2] / "docs/data/options.csv"

# From the recipes of MaxText and tpu-recipes for v5p, v6e and tpu7x, as far as libtpu accepts them.
_AGGREGATOR = {"xla_tpu_enable_sparse_core_collective_aggregator": True}
GROUPS = {
    "SparseCore queue": {
        **_AGGREGATOR,
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,
        "xla_tpu_use_single_sparse_core_for_all_gather_offload": True,
    },
    "layer scheduler": {
        **_AGGREGATOR,
        "xla_tpu_enable_latency_hiding_layer_scheduler": True,
        "xla_tpu_enable_layer_scheduler_for_dependent_collectives": True,
        "xla_tpu_enable_multi_compute_overlap_in_layer_scheduler": False,
        "xla_tpu_scheduler_percent_shared_memory_limit": 150,
    },
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
ONLY = dict.fromkeys(_PARTITIONED, ("gspmd",))


@dataclasses.dataclass(frozen=True)
class Trial:
    """One compilation: the groups beside the chip's options, predicted seconds with their range, and collectives.

    `problem` says why there is no result.
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


def trial_program(algorithm: str, target: Target) -> Program:
    """One layer; half a sequence per device, for FSDP a whole one."""
    model, devices = load_preset(MODEL), target.mesh.size
    batch = devices if algorithm == "fsdp" else devices // 2
    plan = make_plan(ParallelConfig(algorithm), model, target.mesh, batch, SEQ, target.tpu_slice.chip)
    return layer_program(model, plan.groups[0][0], batch * SEQ, SEQ, jnp.dtype("bfloat16"))


def options_of(groups: tuple[str, ...], target: Target) -> dict[str, bool | int | str]:
    """The chip's options with those of `groups`."""
    options = compiler_options(target.tpu_slice.chip) | RANKING
    for group in groups:
        options |= GROUPS[group]
    return options


def compile_trial(groups: tuple[str, ...], program: Program, target: Target, dump: str | None = None) -> Trial:
    """Compiles the program with the options of `groups` and reads its schedule."""
    try:
        schedule = predict(compile_program(program, target, options_of(groups, target), dump))
    except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
        return Trial(groups, problem=str(error).splitlines()[0][:200])
    assert schedule.bounds is not None, "predict computes bounds"
    return Trial(groups, schedule.seconds, *schedule.bounds, schedule.exposed, schedule.blocking)


def search(attempt: Callable[[tuple[str, ...]], Trial], names: tuple[str, ...]) -> Iterator[tuple[Trial, bool]]:
    """Every trial with whether its groups are kept, those of no group first; ends if that has no result."""
    best = attempt(())
    yield best, best.seconds is not None
    for name in names if best.seconds is not None else ():
        trial = attempt((*best.groups, name))
        kept = trial.seconds is not None and trial.seconds < GAIN * best.seconds
        yield trial, kept
        best = trial if kept else best


def groups_of(algorithm: str) -> tuple[str, ...]:
    return tuple(name for name in GROUPS if algorithm in ONLY.get(name, (algorithm,)))


def write_rows(target: Target, algorithm: str, trials: list[tuple[Trial, bool]], table: Path = TABLE) -> None:
    """Replaces the rows of one search in the table."""
    generation, rows = target.tpu_slice.chip.name, []
    if table.exists():
        with table.open() as file:
            rows = [row for row in csv.DictReader(file) if (row["chip"], row["algorithm"]) != (generation, algorithm)]
    for trial, kept in trials:
        values = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in dataclasses.asdict(trial).items()}
        rows.append({
            "chip": generation, "algorithm": algorithm, "target": target.tpu_slice.name,
            "libtpu": importlib.metadata.version("libtpu"), "kept": str(kept).lower(),
            **values, "groups": " + ".join(trial.groups),
        })  # fmt: skip
    rows.sort(key=lambda row: (row["chip"], row["algorithm"]))
    with table.open("w", newline="") as file:
        fields = [field.name for field in dataclasses.fields(Trial)]
        columns = ["chip", "algorithm", "target", "libtpu", "groups", "kept", *fields[1:]]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: list[str]) -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m mstrain.compiler.options", description=about)
    parser.add_argument("targets", nargs="+", help="pod slices such as v6e-32, one per generation")
    parser.add_argument("--mesh", default="4x8")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--dump", help="folder for the compiled programs as text")
    chosen = parser.parse_args(arguments)
    try:
        for target in (make_target(name, chosen.mesh) for name in chosen.targets):
            for algorithm in chosen.algorithms:
                _search_one(target, algorithm, chosen.dump)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _search_one(target: Target, algorithm: str, dump: str | None) -> None:
    program = trial_program(algorithm, target)

    def attempt(groups: tuple[str, ...]) -> Trial:
        name = " ".join((target.tpu_slice.name, algorithm, *groups))
        return compile_trial(groups, dataclasses.replace(program, name=name), target, dump)

    trials = []
    for trial, kept in search(attempt, groups_of(algorithm)):
        print(f"{target.tpu_slice.name} {algorithm} {' + '.join(trial.groups) or 'chip'}: {trial}", flush=True)
        trials.append((trial, kept))
        write_rows(target, algorithm, trials)


if __name__ == "__main__":
    main(sys.argv[1:])
