"""The same curve on every mesh: twenty steps of a small GPT as one compiled program per case.

    python -m tests.training.parity [TABLE ...]    writes docs/data/parity.csv, and prints the table of the page
    python -m tests.training.parity print          prints the table

The file has the largest relative difference of loss and gradient norm from the run on one device in the same dtype, for
every mesh, algorithm, stage of shard=, pipeline and optimizer: the cases of TABLE (tests/training/cases.py), or of all
tables. Rows in the file are not run again. The suite runs a subset that covers each mesh and algorithm at least twice
(test_parity.py).
"""

import csv
import functools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "128")  # threads for emulated devices, see mstrain.mesh.emulate_devices

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.data import Batch
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models import parameters
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.canonical_update import init_moments
from mstrain.program.optimizer import make_optimizer, schedule_of
from mstrain.program.step import make_step, map_copies
from tests.docs.steps import ROOT
from tests.quick import QUICK
from tests.training.cases import MODEL, OPTIMIZER, TABLES, Case
from tests.training.families import SEQ, VOCABULARY

STEPS, SEQUENCES = 20, 16
FILE = ROOT / "docs" / "data" / "parity.csv"
COLUMNS = ("table", "row", "loss", "gradient_norm")


@functools.cache
def module_of(case: Case) -> Transformer:
    mesh = make_mesh(parse_mesh(case.mesh))
    microbatch = SEQUENCES // case.accumulate
    plan = make_plan(case.parallel, case.model, mesh, microbatch, SEQ, shard=case.shard, pipeline=case.pipeline)
    return Transformer(case.model, plan, SEQ, jnp.dtype(case.dtype), case.remat)


@functools.cache
def initial(model: ModelConfig = MODEL):
    """Canonical initial parameters on the host. All tokens of model `skewed` choose the first two experts."""
    reference = module_of(Case("1x1", ParallelConfig("gspmd"), model=model))
    params = jax.tree.map(np.array, jax.device_get(jax.jit(lambda: parameters.init_canonical(reference, 0))()))
    if model.name == "skewed":
        params["blocks_0"]["mlp"]["balance"][:, :2] = 2.0  # above every score
    return params


@functools.cache
def batches() -> np.ndarray:
    """Sequences [STEPS, SEQUENCES, SEQ + 1] that count in steps of 1, 2 or 3: there is something to learn."""
    draw = np.random.default_rng(0)
    start = draw.integers(0, VOCABULARY, (STEPS, SEQUENCES, 1))
    pace = draw.integers(1, 4, (STEPS, SEQUENCES, 1))
    return ((start + pace * np.arange(SEQ + 1)) % VOCABULARY).astype(np.int32)


@functools.cache
def compiled(case: Case):
    """`run(canonical, batches, steps)`: losses and gradient norms [STEPS, 2], and the canonical state."""
    module, optimizer = module_of(case), make_optimizer(case.optimizer)
    step, schedule = make_step(module, optimizer, case.optimizer.sums(0)), schedule_of(case.optimizer, STEPS)

    def run(canonical, batches, steps):
        params = parameters.from_canonical(module, canonical)
        moments = init_moments(module, optimizer, params)
        state = {"step": jnp.int32(0), "params": params, "optimizer": moments}

        def advance(i, carry):
            state, curve = carry
            state, metrics = step(state, Batch(batches[i].reshape(case.accumulate, -1, SEQ + 1)), schedule)
            return state, curve.at[i].set(jnp.stack([metrics["loss"], metrics["grad_norm"]]))

        state, curve = jax.lax.fori_loop(0, steps, advance, (state, jnp.zeros((STEPS, 2))))
        return curve, map_copies(lambda tree: parameters.to_canonical(module, tree), state, optimizer)

    replicated = jax.NamedSharding(module.plan.mesh, jax.P())
    program = jax.jit(run, in_shardings=replicated, out_shardings=replicated)
    return program.lower(initial(case.model), batches(), jnp.int32(0)).compile(QUICK)


@functools.cache
def results(case: Case):
    """Loss and gradient norm of each step [STEPS, 2], and canonical first moments of AdamW after one step.

    First moments are the clipped gradients times 1 - b1; None for other optimizers. Programs are dropped once run:
    dozens would exhaust the memory maps of a process.
    """
    program = compiled(case)
    curve, _ = program(initial(case.model), batches(), np.int32(STEPS))
    moments = None
    if case.optimizer is OPTIMIZER:
        _, state = program(initial(case.model), batches(), np.int32(1))
        moments = jax.device_get(state["optimizer"][1][0].mu)
    if case != case.reference:
        compiled.cache_clear()
    return np.asarray(curve, np.float64), moments


def difference(case: Case) -> np.ndarray:
    """Largest relative difference of loss and of gradient norm to one device in the same dtype."""
    expected, _ = results(case.reference)
    return np.max(np.abs(results(case)[0] / expected - 1), axis=0)


def read() -> dict[tuple[str, str], tuple[float, float]]:
    """Differences of loss and gradient norm by table and row."""
    if not FILE.exists():
        return {}
    with FILE.open() as file:
        return {(table, row): (float(loss), float(norm)) for table, row, loss, norm in list(csv.reader(file))[1:]}


def fill(tables: list[str]) -> None:
    """Runs the cases of `tables` that the file lacks; each is written as soon as it is known."""
    known = read()
    every = [(table, str(case), case) for table, cases in TABLES.items() for case in cases]
    for table, row, case in every:
        if table in tables and (table, row) not in known:
            loss, norm = difference(case)
            known[table, row] = float(f"{loss:.1e}"), float(f"{norm:.1e}")
            rows = [(*key, *known[key]) for key in (each[:2] for each in every) if key in known]
            with FILE.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def summary() -> str:
    """The worst row of every table and dtype, by its gradient norm."""
    lines = ["| cases | dtype | rows | loss, at most | gradient norm, at most | in |", "|---|---|---|---|---|---|"]
    known = read()
    for table, cases in TABLES.items():
        for kind in dict.fromkeys(case.kind for case in cases):
            rows = [str(case) for case in cases if case.kind == kind]
            found = {row: known[table, row] for row in rows if (table, row) in known}
            if found:
                loss, norm = (max(values) for values in zip(*found.values(), strict=True))
                worst = max(found, key=lambda row: found[row][1])
                run = f"{len(rows)}" if len(found) == len(rows) else f"{len(found)} of {len(rows)}"
                lines.append(f"| {table} | {kind} | {run} | {loss:.1e} | {norm:.1e} | `{worst}` |")
    total = sum(map(len, TABLES.values()))
    return "\n".join([*lines, "", f"{len(known)} of {total} rows are in the file."])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    if sys.argv[1:] != ["print"]:
        fill(sys.argv[1:] or [*TABLES])
    print(summary())
