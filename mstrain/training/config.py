"""The schema of a training run. Everything that needs no device is checked at construction, and each message ends with
what to type instead.
"""

import dataclasses
import itertools

from mstrain.checkpoints.config import CheckpointConfig
from mstrain.checks import at_least, one_of
from mstrain.data import DataConfig
from mstrain.hardware import parse_target
from mstrain.job.job import HostsConfig
from mstrain.mesh import parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, check_effect, layer_algorithms, parse_slices
from mstrain.models.transformer import REMAT
from mstrain.program.dtype import DTYPES
from mstrain.program.optimizer import OptimizerConfig
from mstrain.training.evaluate import EvalConfig
from mstrain.training.guard import GuardConfig
from mstrain.training.profiler import ProfileConfig
from mstrain.training.replicas import ReplicasConfig
from mstrain.training.sample import SampleConfig
from mstrain.training.watchdog import WatchdogConfig

TUNE = ("model", "compile")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run; see conf/config.yaml for the defaults of a bare `python train.py`.

    Attributes (beyond the nested ones):
      mesh: `RxC`, `DxRxC` or `auto`.
      plan: plan.json of plan.py, which supplies mesh, parallel, accumulate and remat unless they are given too.
      tokenizer: `bytes`, `bpe`, a tokenizer.json or a Hugging Face name; `vocabulary` is the size of a bpe (or of the
        synthetic corpus).
      batch: sequences per step of the whole job, in `accumulate` microbatches; seq: tokens per sequence.
      steps: optimizer updates in all; seed: of initial weights, batches and samples.
      run_dir: everything the run writes; a checkpoint found there is resumed.
      init_from: run_dir of another run, whose newest parameters a new run begins with.
      dtype: of activations and products: `bf16`, `f32`, or `auto` (bf16 on accelerators). Weights are float32.
      remat: what a layer keeps for its backward pass: `none` of it recomputed, all but `dots`, or in `full`.
      log_every: steps between lines of metrics.jsonl.
      compile_cache: folder of compiled programs, so that a restart compiles nothing; null for none.
      tune: who decides what is `auto` of mesh and slice counts: the cost `model`, or `compile` its best candidates and
        take the fastest schedule (TPU slices, here or absent; the answer is kept).
      target, check: an absent TPU slice such as v5p-64, and true: compile the step for it instead of training.
      coordinator, processes, process: `HOST:PORT` of process 0, how many there are and which this is, where neither a TPU
        pod, SLURM nor Kubernetes tells.
    """

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
    mesh: str = "auto"
    plan: str | None = None
    tokenizer: str = "bytes"
    vocabulary: int | None = None
    batch: int = 32
    seq: int = 128
    steps: int = 300
    seed: int = 0
    run_dir: str = "runs/default"
    init_from: str | None = None
    dtype: str = "auto"
    remat: str = "none"
    accumulate: int = 1
    log_every: int = 1
    compile_cache: str | None = "~/.cache/mstrain/compiled"
    tune: str = "model"
    target: str | None = None
    check: bool = False
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self):
        at_least("", self, batch=1, seq=1, steps=1, seed=0, accumulate=1, log_every=1)
        one_of("dtype", self.dtype, DTYPES)
        one_of("remat", self.remat, REMAT)
        one_of("tune", self.tune, TUNE)
        if self.mesh != "auto":
            parse_mesh(self.mesh)
        if self.parallel.slices != "auto":
            parse_slices(self.parallel.slices)
        used = set(itertools.chain(*layer_algorithms(self.parallel, self.model.layers)))
        check_effect(self.parallel, used)
        open_slices = self.parallel.slices == "auto" and "meshslice" in used
        if self.tune == "compile" and self.mesh != "auto" and not open_slices:
            raise ValueError("tune=compile has nothing to choose. Type mesh=auto, parallel.slices=auto or tune=model.")
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty. Type run_dir=runs/default, or the name of another folder.")
        if self.batch % self.accumulate:
            near = [a for a in range(1, self.batch + 1) if self.batch % a == 0]
            raise ValueError(
                f"batch={self.batch} does not divide into accumulate={self.accumulate} microbatches. "
                f"Type accumulate={min(near, key=lambda a: abs(a - self.accumulate))}, or another batch=."
            )
        if self.model.position == "learned" and self.seq > self.model.context:
            raise ValueError(
                f"seq={self.seq} is longer than the {self.model.context} positions model {self.model.name} learns. "
                f"Type seq={self.model.context} or model.context={self.seq}."
            )
        if self.check != (self.target is not None):
            given = "check=true" if self.check else f"target={self.target}"
            raise ValueError(f"{given} has no effect alone. Type target=v5p-64 check=true, both or neither.")
        if self.target is not None:
            parse_target(self.target)
        if self.profile.start is not None and self.profile.start > self.steps:
            raise ValueError(
                f"profile.start={self.profile.start} comes after the last step. Type a start up to {self.steps}."
            )
