"""What a run is: the typed schema, and the way from a command line to it.

Hydra composes the files under conf/ with the command line; the frozen dataclasses here decide. Everything that needs no
device is checked at construction, and each message ends with what to type instead.
"""

import dataclasses
import difflib
import itertools
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import hydra
import jax.numpy as jnp
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mstrain.checks import at_least, one_of
from mstrain.data import DataConfig
from mstrain.hardware import parse_target
from mstrain.hosts import HostsConfig
from mstrain.mesh import parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig, check_effect, layer_algorithms, parse_slices
from mstrain.models.transformer import REMAT
from mstrain.plan_file import plan_overrides
from mstrain.training.guard import GuardConfig
from mstrain.training.optimizer import OptimizerConfig
from mstrain.training.replicas import ReplicasConfig
from mstrain.training.watchdog import WatchdogConfig

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("model", "data", "parallel")
DTYPES = ("auto", "bf16", "f32")
TUNE = ("model", "compile")


def dtype_on(platform: str, name: str):
    """The dtype of activations and products that one of DTYPES names on JAX's `platform`."""
    if name == "auto":
        name = "f32" if platform == "cpu" else "bf16"
    return {"f32": jnp.float32, "bf16": jnp.bfloat16}[name]


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Save `every` so many steps (and at the end), `keep` the newest so many; stop after `max_failures` in a row."""

    every: int = 100
    keep: int = 3
    max_failures: int = 3

    def __post_init__(self):
        at_least("checkpoint", self, every=1, keep=1, max_failures=1)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation loss `every` so many steps, on the same `batches` batches each time."""

    every: int = 100
    batches: int = 8

    def __post_init__(self):
        at_least("eval", self, every=1, batches=1)


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Trace `steps` steps from step `start` on; null does not trace."""

    start: int | None = None
    steps: int | None = None

    def __post_init__(self):
        if (self.start is None) != (self.steps is None):
            raise ValueError("profile.start and profile.steps belong together. Type profile.start=10 profile.steps=3.")
        if self.start is not None:
            at_least("profile", self, start=1, steps=1)


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """At the end, continue `prompt` by `tokens` tokens (0 for none) at `temperature` (0 takes the likeliest)."""

    prompt: str = "def __init__(self"
    tokens: int = 100
    temperature: float = 0.7

    def __post_init__(self):
        at_least("sample", self, tokens=0, temperature=0)


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


def load_config(arguments: list[str]) -> RunConfig:
    """Composes conf/ with command-line overrides into a checked run; raises ValueError with the fix otherwise."""
    config = compose(RunConfig, "config", [*arguments, *plan_overrides(arguments)])
    return dataclasses.replace(config, optimizer=config.optimizer.for_width(config.model.width))


def compose(kind: type, name: str, arguments: list[str]) -> Any:
    """The dataclass `kind` from conf/NAME.yaml and command-line overrides; raises ValueError with the fix."""
    _check_keys(kind, arguments)
    schema = {field.name: _defaults(field.type) if dataclasses.is_dataclass(field.type) else _default(field)
              for field in dataclasses.fields(kind)}  # fmt: skip
    ConfigStore.instance().store(name="schema", node=schema)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra.compose(name, overrides=arguments)
        values = OmegaConf.to_container(composed, resolve=True)
    except (hydra.errors.HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"Cannot read the command line: {str(error).splitlines()[0]}") from None
    return build(kind, values)


def build(kind: type, values: dict, path: str = "") -> Any:
    """A dataclass from nested plain values, each checked against its annotation."""
    hints = typing.get_type_hints(kind)
    unknown = set(values) - set(hints)
    if unknown:
        raise ValueError(f"{path}{min(unknown)} is not a key. Known: {', '.join(path + name for name in hints)}.")
    for field in dataclasses.fields(kind):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and values.get(field.name) is None:
            raise ValueError(f"{path}{field.name}= is missing. Type {path}{field.name}=VALUE (--help lists the keys).")
    return kind(**{name: _typed(hints[name], value, path + name) for name, value in values.items()})


def known_keys(kind: type = RunConfig) -> list[str]:
    """Every key a command line may set."""
    keys = groups_of(kind)
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            keys += [f"{name}.{field.name}" for field in dataclasses.fields(hint)]
        else:
            keys.append(name)
    return keys


def groups_of(kind: type) -> list[str]:
    """The keys of `kind` that choose a file under conf/."""
    hints = typing.get_type_hints(kind)
    return [group for group in GROUPS if dataclasses.is_dataclass(hints.get(group))]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _check_keys(kind: type, arguments: list[str]) -> None:
    """Unknown keys and group members, with suggestions that Hydra would not make."""
    keys, groups, given = known_keys(kind), groups_of(kind), set()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise ValueError(f"Cannot read {argument!r}. Write key=value, such as mesh=2x4 (--help lists the keys).")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(keys)}."
            raise ValueError(f"There is no key {key!r}. {hint}")
        if key in given:
            raise ValueError(f"{key} is given twice. Type it once.")
        given.add(key)
        if key in groups:
            one_of(key, value, choices(key))


def _typed(hint, value, path):
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{path}={value!r} must be set by its keys, such as {path}.{dataclasses.fields(hint)[0].name}=.")
        return build(hint, value, path + ".")
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(typing.get_args(hint)[0], item, path) for item in value)
    kinds = _kinds(hint)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if str in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if type(value) in kinds:
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    wanted = " or ".join(names.get(kind, "a list, such as '[A,B]'") for kind in kinds)
    raise ValueError(f"{path}={value!r} is not {wanted}.")


def _kinds(hint) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _defaults(kind: type) -> dict:
    return dataclasses.asdict(kind())


def _default(field: dataclasses.Field):
    """The default of a field; None where it has none and must be given."""
    return None if field.default is dataclasses.MISSING else field.default


def run_command(name: str, main, help_lines=None) -> typing.NoReturn:
    """Runs `main(arguments)` as a command: a `ValueError` is one message and exit code 2, anything else a traceback.

    `help_lines(arguments)` gives what --help prints; by default the keys of a training run.
    """
    arguments = sys.argv[1:]
    help_lines = help_lines or (lambda _: describe_keys(RunConfig))
    try:
        if "--help" in arguments or "-h" in arguments:
            rest = [argument for argument in arguments if argument not in ("--help", "-h")]
            print(f"python {name}.py [key=value ...]\n\n" + "\n".join(help_lines(rest)))
            sys.exit(0)
        sys.exit(main(arguments))
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def describe_keys(kind: type) -> list[str]:
    """The keys of `kind` for --help: groups, nested keys with their defaults, then the attributes it documents."""
    lines = [f"{group}=  one of {', '.join(choices(group))}" for group in groups_of(kind)]
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            fields = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(hint))
            lines.append(f"{name}.  {fields}")
    docs = (kind.__doc__ or "").partition("Attributes")[2]
    return [*lines, "", *(line.strip() for line in docs.splitlines()[1:])]
