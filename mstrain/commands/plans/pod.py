"""Plans for homogeneous pods: search, tables, the simulated winner, and the train.py line."""

import sys
from dataclasses import dataclass

from mstrain.checks import at_least, mounted, one_of
from mstrain.commands.plans.output import console, make_folder, no_time_to_simulate
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.pod import Pod
from mstrain.models.config import Automatic, ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.planner.clock import SEARCH_PART, Clock, OutOfTime, check_budget
from mstrain.planner.plan_file import closing_lines, write_plan
from mstrain.planner.remat import parse_remat
from mstrain.planner.report import memory_table, plans_table, plot_plans, stages_table, terms_table, write_tables
from mstrain.planner.request import MEMORY_MARGIN, SCHEDULES, SHARDS, TENSOR, Fixed, PlanRequest
from mstrain.planner.search import search_pod
from mstrain.planner.simulated import simulate_plan
from mstrain.program.optimizer import MOMENTS, OPTIMIZERS, OptimizerConfig

SEQ = 2048  # tokens per sequence where a model has positions for them


@dataclass(frozen=True)
class PodConfig:
    """A plan for a pod of equal devices."""

    model: ModelConfig
    cluster: str = "v4-64"
    """TPU slices (v5p-512, v6e:8x8, 4xv5p-512) or GPUs (h100:16384, a100-80gb:8x64@200GB/s: node x nodes @ network)."""
    batch: int = 256
    """Sequences per step of the whole job."""
    seq: Automatic = None  # type: ignore
    """Tokens per sequence; null is 2048, or all learned positions of a model that has fewer."""
    algorithm: str = "auto"
    """Algorithm of the tensor-parallel products: auto (tries all), meshslice, collective, megatron or fsdp."""
    replicas: str = "auto"
    """Degree of data parallelism, or auto."""
    tensor: str = "auto"
    """Degree of tensor parallelism, or auto."""
    context: str = "auto"
    """Number of parts into which sequences are divided, or auto."""
    expert: str = "auto"
    """Number of parts into which replicas divide the experts, a divisor of the number of experts and of replicas=, or
    auto."""
    pipeline: str = "auto"
    """Number of pipeline stages, or auto."""
    accumulate: str = "auto"
    """Number of microbatches per step and replica, or auto."""
    shard: str = "auto"
    """What is sharded over data-parallel devices: auto, none, optimizer, gradients or parameters (ZeRO 1, 2, 3)."""
    schedule: str = "auto"
    """Pipeline schedule: auto, 1f1b, gpipe, interleaved or zero-bubble."""
    interleave: int | None = None
    """Number of chunks per stage with schedule=interleaved; null tries 2 and 4."""
    remat: str = "auto"
    """Activation checkpointing: auto, none, dots, full, dots-but-mlp-in, save_qkv_proj, minimal_offloaded, or
    `save: PARTS` and `offload: PARTS` (to host memory) of input, qkv, context, out, mlp_in, mlp_out."""
    dtype: str = "bf16"
    """Type of activations and products: bf16 or f32. Weights and gradients are float32."""
    optimizer: str = "adamw"
    """Optimizer of train.py, whose state is in memory: adamw, lion, adafactor or muon."""
    moments: str = "f32"
    """Dtype in which the optimizer's moments are stored: f32 or bf16."""
    memory_margin: float = MEMORY_MARGIN
    """Fraction of a device's memory that plans leave free, from 0 to below 1."""
    top_k: int = 5
    """Number of distinct plans shown."""
    max_seconds: float = 60.0
    """Time limit in seconds of search and simulation, not counting the compilation of kernels. When it ends the search,
    the best plans so far are printed."""
    simulate: bool = True
    """Simulate the best plan and write a trace and pictures, where the time budget allows."""
    simulated_microbatches: int = 8
    """Largest number of microbatches simulated; a pipeline has at least two per stage."""
    calibration: str | None = None
    """A calibration.json that `python benchmark.py bench=calibrate` measured on devices of the cluster's kind."""
    run_dir: str = "runs/plan"
    """Folder of tables, pictures and plan.json."""

    def __post_init__(self):
        mounted("run_dir", self.run_dir)
        if self.seq is None:
            learned = self.model.position == "learned"
            object.__setattr__(self, "seq", min(SEQ, self.model.context) if learned else SEQ)
        at_least("", self, batch=1, seq=1, top_k=1, simulated_microbatches=1)
        one_of("algorithm", self.algorithm, ("auto", *TENSOR))
        one_of("schedule", self.schedule, ("auto", *SCHEDULES))
        one_of("shard", self.shard, ("auto", *SHARDS))
        if self.interleave is not None and (self.schedule != "interleaved" or self.interleave < 2):
            raise ValueError(
                f"interleave={self.interleave} has no effect with schedule={self.schedule}. Drop it, or type "
                "schedule=interleaved interleave=2."
            )
        if self.remat != "auto":
            parse_remat(self.remat)
        one_of("dtype", self.dtype, ("bf16", "f32"))
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("moments", self.moments, MOMENTS)
        for name in ("replicas", "tensor", "context", "expert", "pipeline", "accumulate"):
            value = getattr(self, name)
            if value != "auto" and not (value.isdecimal() and len(value) < 10 and int(value) > 0):
                raise ValueError(
                    f"{name}={value} is not a degree. Type a whole number such as {name}=4, or {name}=auto."
                )
        self._check_expert()
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin={self.memory_margin} is not from 0 to below 1. Type memory_margin=0.1.")
        check_budget(self.max_seconds)
        if self.model.position == "learned" and self.seq > self.model.context:
            raise ValueError(
                f"seq={self.seq} is longer than the {self.model.context} learned positions of model {self.model.name}. "
                f"Type seq={self.model.context} or model.context={self.seq}."
            )

    def _check_expert(self) -> None:
        parts, experts = self.expert, self.model.experts or 1
        if parts in ("auto", "1") or (self.model.experts and experts % int(parts) == 0):
            return
        fits = [n for n in range(1, experts + 1) if experts % n == 0]
        if self.model.experts is None:
            raise ValueError(f"expert={parts} has no effect: the MLP of {self.model.name} is dense. Type expert=auto.")
        raise ValueError(
            f"expert={parts}: the {experts} experts of {self.model.name} do not divide into {parts} parts. Type one "
            f"of {fits}, or expert=auto."
        )

    def request(self, pod: Pod) -> PlanRequest:
        """The request about `pod`."""
        names = TENSOR if self.algorithm == "auto" else (self.algorithm,)
        data, tensor, context, expert, pipeline, microbatches = (
            None if text == "auto" else int(text)
            for text in (self.replicas, self.tensor, self.context, self.expert, self.pipeline, self.accumulate)
        )
        remat, shard, schedule = (None if text == "auto" else text for text in (self.remat, self.shard, self.schedule))
        fixed = Fixed(
            data, tensor, context, pipeline, None, microbatches, remat, shard, schedule, self.interleave, expert
        )
        parallel = tuple(map(ParallelConfig, names))
        optimizer = OptimizerConfig(self.optimizer, moments=self.moments)
        return PlanRequest(
            self.model, pod, parallel, self.batch, self.seq, self.dtype, fixed, self.memory_margin, optimizer=optimizer
        )


def run_pod(config: PodConfig) -> int:
    """Searches, prints, writes; the last line is the train.py command of the best plan it can run."""
    pod = find_pod(config.cluster, config.dtype).calibrated(config.calibration, config.dtype)
    folder, say = make_folder(config.run_dir), console()
    request = config.request(pod)
    clock = Clock((SEARCH_PART if config.simulate else 1) * config.max_seconds)
    result = search_pod(request, clock, lambda line: print(f"plan: {line}", file=sys.stderr))
    write_tables(request, result, folder, config.top_k)
    path = write_plan(request, result, folder)
    plot_plans(request, result.ranked, folder / "throughput_against_memory.png")
    say.print(plans_table(request, result, config.top_k))
    say.print(
        f"{result.summary} {len(result.rejected)} layouts do not fit; links: {result.best.step.at.constants.source}"
    )
    say.print(terms_table(result, config.top_k))
    if result.best.plan.pipeline > 1:
        say.print(stages_table(result))
    say.print(memory_table(result))
    written = ["plans.csv", "stages.csv", "plans.json", "throughput_against_memory.png"]
    if config.simulate:
        clock.budget = config.max_seconds
        try:
            simulated = simulate_plan(request, result.best, config.simulated_microbatches, clock)
            written += simulated.write(folder)
            say.print(*simulated.summary(result.best.plan.microbatches), sep="\n")
        except OutOfTime:
            say.print(no_time_to_simulate(config.max_seconds))
    say.print(f"{', '.join(written)} in {folder}")
    for line in closing_lines(request, result, path):
        say.print(line)
    return 0
