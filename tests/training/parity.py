"""The same curve on every mesh: twenty steps of a small GPT as one compiled program per case.

`python -m tests.training.parity` prints the largest relative difference of loss and gradient norm from the
run on one device, for every mesh, algorithm, stage of shard=, pipeline and optimizer; `... parity optimizers` one table
of them (grid, variants, sharded, context, pipelined, optimizers, sums, experts, exchanged, families). The suite runs a
subset that covers each mesh and algorithm at least twice (test_parity.py).
"""

import dataclasses
import functools
import os
import sys

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
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.parallel.schedules import SCHEDULES
from mstrain.program.canonical_update import init_moments
from mstrain.program.optimizer import OptimizerConfig, make_optimizer, schedule_of
from mstrain.program.step import make_step, map_copies
from tests.quick import QUICK
from tests.training.families import FAMILIES, SEQ, VOCABULARY

MESHES = ("1x1", "2x4", "4x2", "1x8", "8x1", "2x2x2")
STEPS, SEQUENCES = 20, 16
MODEL = ModelConfig(layers=2, width=64, heads=8, mlp_dim=128, vocab_size=VOCABULARY, context=SEQ)
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup=5)
CONTEXT_MESHES = ("context4-row1-col2", "data2-context2-row1-col2", "context2-row2-col2")
MIXED_HALVES = ParallelConfig("wang", mlp="megatron")
MIXED = ParallelConfig("gspmd", attention="megatron", mlp="wang", layers="1:fsdp 1:mlp:summa")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to make the same twenty steps."""

    mesh: str
    parallel: ParallelConfig
    accumulate: int = 1
    remat: str = "none"
    dtype: str = "float32"
    shard: str = "none"
    pipeline: PipelineConfig = PipelineConfig()
    model: ModelConfig = MODEL
    optimizer: OptimizerConfig = OPTIMIZER

    @property
    def reference(self) -> "Case":
        """The same steps on one device."""
        return Case("1x1", ParallelConfig("gspmd"), dtype=self.dtype, model=self.model, optimizer=self.optimizer)

    def __str__(self) -> str:
        p = self.parallel
        name = "mixed" if p == MIXED else p.algorithm
        name += f"-{p.dataflow}" * (p.dataflow != "auto") + f"-S{p.slices}" * (p.slices != "auto")
        name += f"-E{p.expert_slices}" * (p.expert_slices != "auto")
        name += f"-rows-{p.rows}" * (p.rows != "auto") + f"-{p.context}" * (p.context != "auto")
        name += f"-accumulate{self.accumulate}" * (self.accumulate > 1) + f"-{self.remat}" * (self.remat != "none")
        name += f"-{self.shard}" * (self.shard != "none")
        name += "".join(f"-{value}" for value in dataclasses.astuple(self.pipeline) if value)
        name += f"-{self.model.name}" * (self.model is not MODEL)
        name += f"-{self.optimizer.name}" * (self.optimizer is not OPTIMIZER)
        name += f"-{self.optimizer.rounding}" * (self.optimizer.moments == "bf16")
        name += f"-sums-{self.optimizer.rounding}" * (self.optimizer.gradients == "bf16")
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


def context_cases() -> list[Case]:
    """Sequences split over axis `context`, over rows, and over both; both exchanges of keys and values."""
    cases = []
    for exchange in ("gather", "ring"):
        cases += [
            Case(mesh, ParallelConfig(algorithm, context=exchange))
            for mesh in CONTEXT_MESHES
            for algorithm in ALGORITHMS
            if algorithm != "cannon" or mesh == "context2-row2-col2"
        ]
        for mesh in ("4x2", "2x2x2", "context2-row2-col2"):
            rows = ParallelConfig(slices="2", rows="context", context=exchange)
            cases += [Case(mesh, dataclasses.replace(rows, dataflow=flow)) for flow in ("os", "ls", "rs")]
            cases += [Case(mesh, dataclasses.replace(rows, algorithm="fsdp", slices="auto"))]
        cases += [
            Case("data2-context2-row1-col2", ParallelConfig(context=exchange), 2, remat, shard=shard)
            for remat, shard in zip(("none", "dots", "full", "attention"), SHARD, strict=True)
        ]
        cases.append(Case("stage2-context2-row1-col2", ParallelConfig(context=exchange), 2))
    return cases


def pipelined_cases() -> list[Case]:
    """Every schedule on two to four stages: uneven ones, tied tables, all algorithms, microbatches, remat, shard."""
    gpipe, one, interleaved, zero_bubble = map(PipelineConfig, SCHEDULES)
    gpt2, llama, gemma, *_ = FAMILIES.values()
    return [
        Case("stage2", ParallelConfig("collective"), 2, pipeline=gpipe, model=gpt2),
        Case("stage2-col2", ParallelConfig("megatron"), 4, pipeline=one, model=llama),
        Case("stage2-row2-col2", ParallelConfig("meshslice"), 2, "dots", pipeline=interleaved, model=gpt2),
        Case("stage3-row2", ParallelConfig("summa"), 4, pipeline=one, model=gemma),
        Case("stage3", ParallelConfig("collective"), 1, pipeline=gpipe, model=gemma),
        Case("stage2-row2", ParallelConfig("fsdp"), 4, pipeline=interleaved, model=llama),
        Case("stage4", ParallelConfig("gspmd"), 8, "full", pipeline=one, model=gpt2),
        Case("data2-stage2-col2", ParallelConfig("wang"), 2, "full", shard="optimizer", pipeline=one, model=gpt2),
        Case("data2-stage2-row2", ParallelConfig("meshslice"), 4, shard="gradients", pipeline=gpipe, model=llama),
        Case("replica2-stage2-col2", ParallelConfig("collective"), 2, pipeline=one, model=gemma),
        Case("stage2-row2-col2", ParallelConfig("cannon"), 2, pipeline=gpipe, model=llama),
        Case("stage2-row2-col2", MIXED_HALVES, 2, pipeline=one, model=gpt2),
        Case("stage2", ParallelConfig("collective"), 2, pipeline=PipelineConfig("1f1b", layers="1 4"), model=gpt2),
        Case("stage3-col2", ParallelConfig("meshslice"), 4, pipeline=zero_bubble, model=gpt2),
        Case("stage2-row2", ParallelConfig("gspmd"), 4, "full", pipeline=zero_bubble, model=llama),
        Case("stage4", ParallelConfig("megatron"), 2, "dots", pipeline=zero_bubble, model=gpt2),
        Case("data2-stage2-row2", ParallelConfig("fsdp"), 4, shard="gradients", pipeline=zero_bubble, model=gemma),
        Case("data2-stage2-col2", ParallelConfig(slices="2"), 2, shard="parameters", pipeline=one, model=gpt2),
        Case("data2-stage3", ParallelConfig("collective"), 2, "full", shard="parameters", pipeline=gpipe, model=gpt2),
        Case("data2-stage2", MIXED_HALVES, 4, "dots", shard="parameters", pipeline=interleaved, model=llama),
        Case("data2-stage2-row2", ParallelConfig(), 2, shard="parameters", pipeline=zero_bubble, model=gpt2),
    ]


def sum_cases() -> list[Case]:
    """Gradients summed in bf16 over microbatches; one device sums those of one microbatch in float32."""
    nearest = dataclasses.replace(OPTIMIZER, gradients="bf16")
    stages, gpt2 = PipelineConfig("1f1b"), FAMILIES["gpt2"]
    return [
        case
        for optimizer in (nearest, dataclasses.replace(nearest, rounding="stochastic"))
        for case in (
            Case("4x2", ParallelConfig(slices="2"), 2, optimizer=optimizer),
            Case("4x2", ParallelConfig(slices="2"), 16, optimizer=optimizer),
            Case("stage2-row2-col2", ParallelConfig(), 2, pipeline=stages, model=gpt2, optimizer=optimizer),
        )
    ]


def expert_cases() -> list[Case]:
    """Layers of experts with losses and biases that keep their load even: every algorithm, ZeRO, stages, context."""
    model = FAMILIES["mixtral"]
    return [
        Case("2x2x2", ParallelConfig(slices="2"), shard="parameters", model=model),
        Case("2x4", ParallelConfig(slices="2"), model=model),
        Case("2x2x2", ParallelConfig("collective", dataflow="rs"), shard="parameters", model=model),
        Case("stage2-row2-col2", ParallelConfig(), 1, pipeline=PipelineConfig("gpipe"), model=model),
        Case("1x1", ParallelConfig("meshslice", slices="2", dataflow="os"), model=model),
        Case("4x2", ParallelConfig("wang"), remat="full", model=model),
        Case("4x2", ParallelConfig("summa"), remat="dots", model=model),
        Case("1x8", ParallelConfig("megatron"), model=model),
        Case("8x1", ParallelConfig("fsdp"), model=model),
        Case("2x2x2", ParallelConfig("cannon"), shard="optimizer", model=model),
        Case("2x2x2", ParallelConfig("gspmd"), model=model),
        Case("2x2x2", ParallelConfig("collective", mlp="megatron"), shard="gradients", model=model),
        Case("context2-row2-col2", ParallelConfig("collective", rows="context", context="ring"), model=model),
    ]


def exchanged_cases() -> list[Case]:
    """Experts divided over axis `expert`: algorithms, ZeRO, stages, context; even loads, and all tokens at one part."""
    even, skewed = FAMILIES["mixtral"], FAMILIES["skewed"]
    alone = dataclasses.replace(even, balance_loss=0.0, router_z_loss=0.0, balance_rate=0.0)  # of every microbatch
    two = ParallelConfig("collective", expert_slices="2")
    return [
        Case("data2-expert2-row1-col2", two, shard="parameters", model=even),
        Case("expert2-row2-col2", ParallelConfig(slices="2", expert_slices="2"), model=skewed),
        Case("expert4-row1-col2", ParallelConfig("megatron", expert_slices="4"), remat="full", model=even),
        Case("expert4-row2-col1", ParallelConfig("fsdp"), model=skewed),
        Case("expert2-row2-col2", ParallelConfig("collective", dataflow="rs"), shard="optimizer", model=even),
        Case("expert2-row2-col2", ParallelConfig("cannon"), remat="dots", model=skewed),
        Case("data2-expert2-row1-col2", ParallelConfig("gspmd", expert_slices="2"), model=even),
        Case("expert2-row2-col2", ParallelConfig("wang"), shard="gradients", model=even),
        Case("data2-expert2-row2-col1", ParallelConfig(slices="2"), shard="parameters", model=skewed),
        Case("data2-expert2-row2-col1", ParallelConfig("summa"), shard="gradients", model=skewed),
        Case("stage2-expert2-row1-col2", two, 2, pipeline=PipelineConfig(), model=skewed),
        Case("stage2-expert2-row2-col1", two, 2, pipeline=PipelineConfig("zero-bubble"), model=alone),
        Case("expert2-context2-row1-col2", ParallelConfig(context="ring", expert_slices="2"), model=skewed),
        Case("replica2-expert2-row1-col2", ParallelConfig(), 2, shard="parameters", model=skewed),
        Case("expert4-row1-col2", two, shard="parameters", model=dataclasses.replace(even, expert_capacity=1.0)),
    ]


def family_cases() -> list[Case]:
    """Sinks, biases of experts, latent attention, shared experts, dense layers: ZeRO, stages, context, axis expert."""
    gpt_oss, deepseek = FAMILIES["gpt_oss"], FAMILIES["deepseek"]
    ring = ParallelConfig("collective", rows="context", context="ring")
    return [
        Case("2x2x2", ParallelConfig(slices="2"), shard="parameters", model=deepseek),
        Case("context2-row2-col2", ring, model=deepseek),
        Case("expert2-row2-col2", ParallelConfig("collective"), remat="full", model=deepseek),
        Case("1x8", ParallelConfig("megatron"), remat="dots", model=deepseek),
        Case("2x2x2", ParallelConfig("cannon"), shard="optimizer", model=deepseek),
        Case("2x4", ParallelConfig(slices="2", dataflow="rs"), model=deepseek),
        Case("8x1", ParallelConfig("fsdp"), model=deepseek),
        Case("2x4", ParallelConfig(slices="2"), remat="full", model=gpt_oss),
        Case("context2-row2-col2", ring, model=gpt_oss),
        Case("expert2-row2-col2", ParallelConfig("collective"), model=gpt_oss),
        Case("stage2-row2-col2", ParallelConfig(), 1, pipeline=PipelineConfig("gpipe"), model=gpt_oss),
        Case("2x2x2", ParallelConfig(slices="2", dataflow="rs"), shard="parameters", model=gpt_oss),
    ]


def optimizer_cases() -> list[Case]:
    """Every other optimizer, and moments in bf16, on meshes of every kind."""
    muon, adafactor, lion = (dataclasses.replace(OPTIMIZER, name=name) for name in ("muon", "adafactor", "lion"))
    stochastic = dataclasses.replace(OPTIMIZER, moments="bf16", rounding="stochastic")
    gpt2, _, gemma, *_ = FAMILIES.values()
    return [
        case
        for optimizer in (muon, adafactor, lion, stochastic, dataclasses.replace(stochastic, name="muon"))
        for case in (
            Case("2x4", ParallelConfig(slices="2"), optimizer=optimizer),
            Case("4x2", MIXED, accumulate=2, optimizer=optimizer),
            Case("1x8", ParallelConfig("megatron"), optimizer=optimizer),
            Case("8x1", ParallelConfig("fsdp"), remat="full", optimizer=optimizer),
            Case(
                "stage3-row2", ParallelConfig("summa"), 4, pipeline=PipelineConfig(), model=gemma, optimizer=optimizer
            ),
            Case("2x2x2", ParallelConfig("meshslice"), shard="parameters", optimizer=optimizer),
            Case("context2-row2-col2", ParallelConfig("fsdp", rows="context", context="ring"), optimizer=optimizer),
            Case("stage2-row2-col2", ParallelConfig(), 2, pipeline=PipelineConfig(), model=gpt2, optimizer=optimizer),
        )
    ]


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


TABLES = {
    "variants": variant_cases, "sharded": sharded_cases, "context": context_cases, "pipelined": pipelined_cases,
    "optimizers": optimizer_cases, "sums": sum_cases, "experts": expert_cases, "families": family_cases,
    "exchanged": exchanged_cases,
}  # fmt: skip


def main(tables: list[str]) -> None:
    """Prints the tables called so, all without a name, each row as soon as it is known."""
    if not tables or "grid" in tables:
        names = [*ALGORITHMS, "mixed"]
        print("| mesh | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
        for mesh in MESHES:
            found = {str(case).partition("-")[2]: case for case in grid_cases() if case.mesh == mesh}
            cells = [f"{max(difference(found[name])):.1e}" if name in found else "not square" for name in names]
            print(f"| {mesh} | " + " | ".join(cells) + " |", flush=True)
    print("\n| case | loss | gradient norm |\n| --- | --- | --- |")
    for case in (case for name, cases in TABLES.items() if not tables or name in tables for case in cases()):
        loss, grad_norm = difference(case)
        print(f"| {case} | {loss:.1e} | {grad_norm:.1e} |", flush=True)
    loss, grad_norm = np.max(np.abs(results(BF16_REFERENCE)[0] / results(REFERENCE)[0] - 1), axis=0)
    print(f"| {BF16_REFERENCE} against float32 | {loss:.1e} | {grad_norm:.1e} |")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    main(sys.argv[1:])
