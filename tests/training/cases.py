"""The cases of parity: ways to make the same twenty steps, in tables (`python -m tests.training.parity`)."""

import dataclasses

from mstrain.gemm import ALGORITHMS
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig
from mstrain.models.sharding import SHARD
from mstrain.models.stages import PipelineConfig
from mstrain.parallel.schedules import SCHEDULES
from mstrain.program.optimizer import OptimizerConfig
from tests.training.families import FAMILIES, SEQ, VOCABULARY

MESHES = ("1x1", "2x4", "4x2", "1x8", "8x1", "2x2x2")
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

    @property
    def kind(self) -> str:
        """What is float32, or what is bf16 instead."""
        sums, moments = self.optimizer.gradients == "bf16", self.optimizer.moments == "bf16"
        bf16 = "compute" * (self.dtype == "bfloat16") or "moments" * moments or "sums of gradients" * sums
        return f"{bf16} in bf16" if bf16 else "float32"

    def __str__(self) -> str:
        p = self.parallel
        name = "mixed" if p == MIXED else p.algorithm
        name += f"-mlp-{p.mlp}" * (p != MIXED and p.mlp is not None)
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
    """Every stage of `shard=` with every algorithm, on two meshes with data-parallel replicas, one accumulating."""
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
    alone = dataclasses.replace(deepseek, balance_loss=0.0)  # of every microbatch
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
        Case("stage2-col2", ParallelConfig("collective"), 2, pipeline=PipelineConfig(), model=alone),
        Case(
            "data2-stage2",
            ParallelConfig("collective"),
            2,
            "full",
            shard="parameters",
            pipeline=PipelineConfig("zero-bubble"),
            model=alone,
        ),
    ]


def mtp_cases() -> list[Case]:
    """Layers that predict further tokens: algorithms and dataflows, ZeRO, stages, context, experts, optimizers."""
    gpt2, llama, gemma, deepseek = (
        dataclasses.replace(FAMILIES[name], name=f"{name}-mtp", mtp_layers=count, layers=2)
        for name, count in (("gpt2", 2), ("llama", 1), ("gemma", 1), ("deepseek", 1))
    )
    ring = ParallelConfig("collective", rows="context", context="ring")
    muon = dataclasses.replace(OPTIMIZER, name="muon")
    return [
        Case("2x4", ParallelConfig(slices="2"), model=gpt2),
        Case("data2-row1-col2", ParallelConfig("collective"), shard="parameters", model=deepseek),
        Case("stage2-row1-col2", ParallelConfig(), 2, pipeline=PipelineConfig(), model=gpt2),
        Case("context2-row2-col2", ring, model=gpt2),
        Case("1x4", ParallelConfig("megatron"), remat="dots", model=llama),
        Case("2x4", ParallelConfig(slices="2", dataflow="rs"), model=gemma),
        Case("expert2-row2-col2", ParallelConfig("collective"), remat="full", model=deepseek),
        Case("8x1", ParallelConfig("fsdp"), 2, model=llama),
        Case("2x2x2", ParallelConfig("cannon"), shard="gradients", model=llama),
        Case("4x2", ParallelConfig("wang"), model=llama),
        Case("4x2", ParallelConfig("summa", dataflow="os"), model=llama),
        Case("2x2x2", ParallelConfig("gspmd"), shard="optimizer", model=llama),
        Case("2x4", MIXED_HALVES, model=llama, optimizer=muon),
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


TABLES = {
    "grid": grid_cases(), "variants": variant_cases(), "sharded": sharded_cases(), "context": context_cases(),
    "pipelined": pipelined_cases(), "optimizers": optimizer_cases(), "sums": sum_cases(), "experts": expert_cases(),
    "families": family_cases(), "exchanged": exchanged_cases(), "mtp": mtp_cases(),
}  # fmt: skip
