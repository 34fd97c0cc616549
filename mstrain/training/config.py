"""The configuration of a training run. Construction checks everything that needs no device. Each error message ends
with what to type instead.
"""

import dataclasses
import itertools
from typing import ClassVar

import jax.numpy as jnp

from mstrain.checkpoints.config import CheckpointConfig
from mstrain.checks import at_least, mounted, one_of
from mstrain.data import PACKS, DataConfig
from mstrain.gemm import any_sliced
from mstrain.gemm.precision import Precision
from mstrain.hardware import parse_target
from mstrain.job.job import HostsConfig
from mstrain.mesh import parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.expert_axis import check_experts
from mstrain.models.parallel import ParallelConfig, check_effect, layer_algorithms, parse_slices
from mstrain.models.precision import check_precision
from mstrain.models.remat import check_remat
from mstrain.models.sharding import SHARD
from mstrain.models.stages import PipelineConfig, make_stages
from mstrain.program.dtype import DTYPES
from mstrain.program.optimizer import OptimizerConfig
from mstrain.program.step_config import StepConfig
from mstrain.training.answers import answer
from mstrain.training.evaluate import EvalConfig
from mstrain.training.guard import GuardConfig
from mstrain.training.identity import flat, parse_allow
from mstrain.training.profiler import ProfileConfig
from mstrain.training.replicas import ReplicasConfig
from mstrain.training.sample import SampleConfig
from mstrain.training.watchdog import WatchdogConfig

TUNE = ("model", "compile")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run. conf/config.yaml overrides some of these defaults."""

    explain: ClassVar = staticmethod(answer)

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    check_replicas: ReplicasConfig = dataclasses.field(default_factory=ReplicasConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    mesh: str = "auto"
    """Mesh of devices: `ROWxCOL`, `DATAxROWxCOL`, named axes such as `data2-row4-col8`, or `auto` (chosen by the cost
    model, axes `stage` and `context` included; 2x4 on a CPU)."""
    plan: str | None = None
    """A plan.json file written by `mstrain plan`. It sets mesh, parallel, accumulate, remat, offload, shard and
    pipeline, except those that are also given. `auto` searches the best plan for the devices present (with check=true,
    for those of target=) and sets those of these keys that have their defaults."""
    tokenizer: str = "bytes"
    """Tokenizer: `bytes`, `bpe` (trained on the corpus), a tokenizer.json or SentencePiece .model file, a folder with
    one of them, or a Hugging Face name."""
    vocab_size: int | None = None
    """Vocabulary size for tokenizer=bpe (default 8192) or data=synthetic (default 256)."""
    batch: int = 32
    """Sequences per step of the whole job."""
    seq: int = 128
    """Tokens per sequence."""
    pack: str = "auto"
    """How documents are packed into sequences: `concat` (concatenated, with attention across documents), `segments`
    (concatenated, with attention and positions restricted to a document), `none` (one document per sequence), or `auto`
    (segments for data=chat, else concat)."""
    steps: int = 300
    """Total number of optimizer updates. The learning rate schedule ends at the last one."""
    seed: int = 0
    """Random seed of initial weights, batch order and samples."""
    run_dir: str = "runs/default"
    """Folder for all files of the run. If it has a checkpoint, the run resumes from it."""
    init_from: str | None = None
    """The run_dir of another run. A new run starts from the weights of its newest checkpoint."""
    init: str | None = None
    """Folder of a model in Hugging Face's format: config.json, safetensors, tokenizer.json. A new run takes its
    architecture, tokenizer and weights."""
    allow: str | None = None
    """Keys or groups, separated by spaces, that may differ from run_dir/run.json on a resume, such as
    `optimizer.learning_rate steps`. `lost_steps:N` restarts at step 0 when the checkpoints of N steps are lost.
    `no_record` resumes a run_dir without run.json."""
    dtype: str = "auto"
    """Dtype of activations and matmuls: `bf16`, `f32`, or `auto` (bf16 on accelerators, f32 on CPUs). Weights and
    optimizer state are float32."""
    precision: str = "bf16"
    """Operands of the layers' products: `int8` or `fp8` (float8) with a scale for each row and column and sums in int32
    or float32; `bf16` leaves them in `dtype`."""
    travel: str = "bf16"
    """Operands that the layers' products all-gather: `int8` sends them in 8 bits and multiplies them in `dtype`; `bf16`
    sends them in `dtype`."""
    remat: str = "none"
    """Activation checkpointing: `none` recomputes nothing; `dots` keeps the results of products and of attention;
    `dots-but-mlp-in` keeps these except that of the product into the MLP; `attention` keeps the result of attention;
    `full` keeps the input of a layer only; `auto` compiles these in this order and takes the first that fits in memory.
    Or names of values to keep, joined by `+`: `layer-input`, `attention-norm`, `attention-in`, `attention`,
    `attention-out`, `mlp-norm`, `mlp-in`, `mlp-out`."""
    offload: str | None = None
    """Values that are kept in host memory until they are needed: names as in `remat`, joined by `+`, and `moments` of
    the optimizer. Null offloads nothing."""
    shard: str = "none"
    """What is sharded over data-parallel replicas: `none`; `optimizer` shards float32 weights and moments over mesh
    axis `data`, with one all_gather of weights per step (ZeRO 1); `gradients` also sums gradients by reduce_scatter
    (ZeRO 2); `parameters` also gathers the weights of each layer while the previous layer computes (ZeRO 3)."""
    accumulate: int = 1
    """Microbatches per step; their gradients are averaged. Must divide batch. A mesh with stages pipelines them."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    wandb: str | None = None
    """Weights & Biases project to which metrics are also sent. Its client (pip install wandb) reads its own environment
    variables, such as WANDB_MODE=offline. Null sends nothing."""
    compile_cache: str | None = "~/.cache/mstrain/compiled"
    """Folder of JAX's persistent compilation cache; null disables it."""
    tune: str = "model"
    """How `auto` values are chosen: `model` (cost model) or `compile` (compile the best candidates for the TPU slice
    and keep the fastest; the result is cached)."""
    calibration: str | None = None
    """A calibration.json that `python benchmark.py bench=calibrate` measured on these devices. Predicted step times
    use it."""
    target: str | None = None
    """TPU slice, such as v5p-64, or several slices, such as 2xv5p-64, for which check=true compiles the step. No TPU is
    needed."""
    check: bool = False
    """Compile the step for target= and report memory and time instead of training."""
    coordinator: str | None = None
    """HOST:PORT of process 0. Needed where neither a TPU pod, SLURM nor Kubernetes provides it."""
    processes: int | None = None
    """Number of processes of the job. Requires coordinator= and process=."""
    process: int | None = None
    """Index of this process, from 0. Requires coordinator= and processes=."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def products(self) -> Precision:
        """The precision of the layers' products."""
        return Precision(self.precision, self.travel)

    def step_config(self, model: ModelConfig, dtype) -> StepConfig:
        """What the training step is compiled from; `model` has a vocab_size."""
        return StepConfig(
            model, self.batch, self.seq, self.parallel, self.accumulate, jnp.dtype(dtype).name, self.remat,
            self.offload, self.shard, self.pipeline, self.products, self.optimizer,
        )  # fmt: skip

    def __post_init__(self):
        at_least("", self, batch=1, seq=1, steps=1, seed=0, accumulate=1, log_every=1)
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed} is too large. Type a seed below 2**63, such as seed=1.")
        one_of("dtype", self.dtype, DTYPES)
        check_remat(self.remat, self.offload)
        one_of("pack", self.pack, PACKS)
        one_of("shard", self.shard, SHARD)
        one_of("tune", self.tune, TUNE)
        if self.mesh != "auto":
            check_experts(self.model, self.parallel, parse_mesh(self.mesh))
            count = parse_mesh(self.mesh).stage
            if stages := count > 1 and make_stages(self.pipeline, count, self.model.layers - self.model.dense_layers):
                stages.check_microbatches(self.accumulate)
        if self.parallel.slices != "auto":
            parse_slices(self.parallel.slices)
        used = set(itertools.chain(*layer_algorithms(self.parallel, self.model.layers)))
        check_effect(self.parallel, used)
        check_precision(self.products, self.model, used)
        open_slices = self.parallel.slices == "auto" and any_sliced(used)
        if self.tune == "compile" and self.mesh != "auto" and not open_slices:
            raise ValueError("tune=compile has nothing to choose. Type mesh=auto, parallel.slices=auto or tune=model.")
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty. Type run_dir=runs/default, or the name of another folder.")
        mounted("run_dir", self.run_dir)
        mounted("init_from", self.init_from)
        mounted("init", self.init)
        if self.init and self.init_from:
            raise ValueError("init= and init_from= both name the weights to start from. Type one of them.")
        parse_allow(self.allow, flat(self))
        if self.batch % self.accumulate:
            near = [a for a in range(1, self.batch + 1) if self.batch % a == 0]
            raise ValueError(
                f"batch={self.batch} does not divide into accumulate={self.accumulate} microbatches. "
                f"Type accumulate={min(near, key=lambda a: abs(a - self.accumulate))}, or another batch=."
            )
        if self.model.position == "learned" and self.seq > self.model.context:
            raise ValueError(
                f"seq={self.seq} is longer than the {self.model.context} learned positions of model {self.model.name}. "
                f"Type seq={self.model.context} or model.context={self.seq}."
            )
        if self.model.mtp_layers >= self.seq:
            raise ValueError(
                f"model.mtp_layers={self.model.mtp_layers} predicts tokens beyond sequences of seq={self.seq}. Type a "
                "larger seq=, or fewer layers."
            )
        if self.check != (self.target is not None):
            given = "check=true" if self.check else f"target={self.target}"
            raise ValueError(f"{given} has no effect by itself. Type target=v5p-64 check=true, both or neither.")
        if self.target is not None:
            parse_target(self.target)
        if self.profile.start is not None and self.profile.start > self.steps:
            raise ValueError(
                f"profile.start={self.profile.start} comes after the last step. Type a start up to {self.steps}."
            )
