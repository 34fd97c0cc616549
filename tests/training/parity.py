"""The same curve on every mesh: twenty steps of a small GPT as one compiled program per case.

`python -m tests.training.parity` prints the largest relative difference of loss and gradient norm from the
run on one device, for every mesh, algorithm and stage of shard=. The suite runs a subset that covers each mesh
and algorithm at least twice (test_parity.py).
"""

import dataclasses
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "128")  # threads for emulated devices, see mstrain.mesh.emulate_devices

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.data import Batch
from mstrain.gemm import ALGORITHMS
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models import parameters
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.sharding import SHARD
from mstrain.models.transformer import Transformer
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import make_step, map_copies

MESHES = ("1x1", "2x4", "4x2", "1x8", "8x1", "2x2x2")
STEPS, SEQUENCES, SEQ, VOCABULARY = 20, 16, 16, 61  # the vocabulary divides over no mesh
MODEL = ModelConfig(layers=2, width=64, heads=8, mlp_dim=128, vocab_size=VOCABULARY, context=SEQ)
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup=5)
MIXED = ParallelConfig("gspmd", attention="megatron", mlp="wang", layers="1:fsdp 1:mlp:summa")
# Compile time dominates, and the numbers do not depend on how hard LLVM tries.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to make the same twenty steps."""

    mesh: str
    parallel: ParallelConfig
    accumulate: int = 1
    remat: str = "none"
    dtype: str = "float32"
    shard: str = "none"

    def __str__(self) -> str:
        p = self.parallel
        name = "mixed" if p == MIXED else p.algorithm
        name += f"-{p.dataflow}" * (p.dataflow != "auto") + f"-S{p.slices}" * (p.slices != "auto")
        name += f"-accumulate{self.accumulate}" * (self.accumulate > 1) + f"-{self.remat}" * (self.remat != "none")
        name += f"-{self.shard}" * (self.shard != "none")
        return f"{self.mesh}-{name}" + "-bf16" * (self.dtype == "bfloat16")


REFERENCE = Case("1x1", ParallelConfig("gspmd"))
BF16_REFERENCE = dataclasses.replace(REFERENCE, dtype="bfloat16")


def grid_cases() -> list[Case]:
    """Every mesh with every algorithm that runs on it, and a stack that mixes them."""
    return [
        Case(mesh, parallel)
        for mesh in MESHES
        for parallel in (*map(ParallelConfig, ALGORITHMS), MIXED)
        if parallel.algorithm != "cannon" or mesh in ("1x1", "2x2x2")
    ]


def variant_cases() -> list[Case]:
    """Dataflows, slice counts, microbatches, recomputation and bfloat16, on one wide and one tall mesh."""
    cases = []
    for mesh in ("2x4", "4x2"):
        sliced = ParallelConfig(slices="2")
        for algorithm in ("meshslice", "collective", "wang", "summa"):
            cases += [Case(mesh, ParallelConfig(algorithm, dataflow=flow)) for flow in ("os", "ls", "rs")]
        cases += [Case(mesh, ParallelConfig(slices="2", dataflow=flow)) for flow in ("os", "ls", "rs")]
        cases += [Case(mesh, ParallelConfig(slices="4", dataflow="os")), Case(mesh, sliced, accumulate=2)]
        cases += [Case(mesh, sliced, remat=remat) for remat in ("dots", "full")]
        cases += [Case(mesh, parallel, dtype="bfloat16") for parallel in (sliced, ParallelConfig("wang"), MIXED)]
    cases += [Case("2x2x2", ParallelConfig("cannon", dataflow=flow)) for flow in ("os", "ls", "rs")]
    return cases


def sharded_cases() -> list[Case]:
    """Every stage of `shard=` with every algorithm, on two meshes with data-parallel copies, one accumulating."""
    return [
        Case(mesh, parallel, accumulate, remat, shard=shard)
        for mesh, accumulate, remat in (("2x2x2", 1, "none"), ("4x2x1", 2, "full"))
        for parallel in (*map(ParallelConfig, ALGORITHMS), MIXED)
        for shard in SHARD
        if parallel.algorithm != "cannon" or mesh == "2x2x2"
    ]


@functools.cache
def module_of(case: Case) -> Transformer:
    mesh = make_mesh(parse_mesh(case.mesh))
    plan = make_plan(case.parallel, MODEL, mesh, SEQUENCES // case.accumulate, SEQ, shard=case.shard)
    return Transformer(MODEL, plan, SEQ, jnp.dtype(case.dtype), case.remat)


@functools.cache
def initial():
    """Canonical initial parameters on the host."""
    return jax.device_get(jax.jit(lambda: parameters.init_canonical(module_of(REFERENCE), 0))())


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
    module, optimizer = module_of(case), make_optimizer(OPTIMIZER, STEPS)
    step = make_step(module, optimizer)

    def run(canonical, batches, steps):
        params = parameters.from_canonical(module, canonical)
        state = {"step": jnp.int32(0), "params": params, "optimizer": optimizer.init(params)}

        def advance(i, carry):
            state, curve = carry
            state, metrics = step(state, Batch(batches[i].reshape(case.accumulate, -1, SEQ + 1)))
            return state, curve.at[i].set(jnp.stack([metrics["loss"], metrics["grad_norm"]]))

        state, curve = jax.lax.fori_loop(0, steps, advance, (state, jnp.zeros((STEPS, 2))))
        return curve, map_copies(lambda tree: parameters.to_canonical(module, tree), state, optimizer)

    replicated = jax.NamedSharding(module.plan.mesh, jax.P())
    program = jax.jit(run, in_shardings=replicated, out_shardings=replicated)
    return program.lower(initial(), batches(), jnp.int32(0)).compile(QUICK)


@functools.cache
def results(case: Case):
    """Loss and gradient norm of each step [STEPS, 2], and canonical first moments after one step.

    First moments are the clipped gradients times 1 - b1. Programs are dropped once run: dozens would exhaust
    the memory maps of a process.
    """
    program = compiled(case)
    curve, _ = program(initial(), batches(), np.int32(STEPS))
    _, state = program(initial(), batches(), np.int32(1))
    moments = jax.device_get(state["optimizer"][1][0].mu)
    if case != REFERENCE:
        compiled.cache_clear()
    return np.asarray(curve, np.float64), moments


def difference(case: Case) -> np.ndarray:
    """Largest relative difference of loss and of gradient norm to one device in the same dtype."""
    expected, _ = results(BF16_REFERENCE if case.dtype == "bfloat16" else REFERENCE)
    return np.max(np.abs(results(case)[0] / expected - 1), axis=0)


def main() -> None:
    """Prints both tables, each row as soon as it is known."""
    names = [*ALGORITHMS, "mixed"]
    print("| mesh | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
    for mesh in MESHES:
        found = {str(case).partition("-")[2]: case for case in grid_cases() if case.mesh == mesh}
        cells = [f"{max(difference(found[name])):.1e}" if name in found else "not square" for name in names]
        print(f"| {mesh} | " + " | ".join(cells) + " |", flush=True)
    print("\n| case | loss | gradient norm |\n| --- | --- | --- |")
    for case in variant_cases() + sharded_cases():
        loss, grad_norm = difference(case)
        print(f"| {case} | {loss:.1e} | {grad_norm:.1e} |", flush=True)
    loss, grad_norm = np.max(np.abs(results(BF16_REFERENCE)[0] / results(REFERENCE)[0] - 1), axis=0)
    print(f"| {BF16_REFERENCE} against float32 | {loss:.1e} | {grad_norm:.1e} |")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
