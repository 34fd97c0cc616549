"""The keys of benchmark.py and their checks, which need no device."""

import dataclasses
import re
from typing import ClassVar

import jax.numpy as jnp

from mstrain.benchmarks.presets import PEER_MODELS, PEERS, preset_arguments
from mstrain.checks import at_least, mounted, one_of
from mstrain.cli import added, compose
from mstrain.gemm import ALGORITHMS, find_algorithm
from mstrain.gemm.precision import Precision
from mstrain.hardware import TpuSlice, parse_target
from mstrain.mesh import MeshShape, parse_mesh
from mstrain.models.config import Automatic, ModelConfig
from mstrain.models.parallel import ParallelConfig, check_effect
from mstrain.models.precision import check_precision
from mstrain.models.products import projections
from mstrain.models.remat import AUTO, check_remat
from mstrain.models.sharding import SHARD
from mstrain.models.zoo import BYTES, load_preset
from mstrain.program.dtype import DTYPES
from mstrain.program.step_config import StepConfig
from mstrain.training.answers import answer
from mstrain.training.config import TUNE

BENCHES = ("step", "layer", "gemm", "nongemm", "collectives", "calibrate", "data", "tune", "peers")
PRODUCTS = tuple(p.name for p in projections(ModelConfig()))
# The names that train.py has for the same choices.
SYNONYMS = {
    "model": "models", "mesh": "meshes", "parallel": "algorithms", "parallel.slices": "slices",
    "parallel.dataflow": "dataflow",
}  # fmt: skip
WORDS = ("models", "algorithms", "meshes", "slices")
EIGHT_BITS = ("precision", "travel")
PRECISE = ("step", "layer", "gemm")  # benches of products
# Keys without effect for a bench; typing one is an error.
IDLE = {
    "layer": ("remat", "accumulate", "shard"),
    "gemm": ("remat", "accumulate", "shard"),
    "nongemm": ("remat", "accumulate", "shard", "slices", "dataflow", *EIGHT_BITS),
    "collectives": ("models", "layers", "algorithms", "slices", "dataflow", "batch", "seq", "remat",
                    "accumulate", "shard", "target", "emulate", "dump", *EIGHT_BITS),
    "calibrate": ("models", "layers", "algorithms", "slices", "dataflow", "batch", "seq", "remat", "accumulate",
                  "shard", "target", "emulate", "dump", "warmup", *EIGHT_BITS),
    "data": ("models", "layers", "algorithms", "meshes", "slices", "dataflow", "dtype", "remat", "accumulate", "shard",
             "target", "emulate", "dump", "warmup", *EIGHT_BITS),
    "tune": ("algorithms", "emulate", "dump", "repeats", "warmup", *EIGHT_BITS),
    "peers": ("algorithms", "meshes", "slices", "dataflow", "remat", "accumulate", "shard", "target", "emulate",
              "dump", *EIGHT_BITS),
}  # fmt: skip


def _explain(key: str, value: str) -> str | None:
    """The advice of train.py on a key of another framework, if benchmark.py also has the advised key."""
    advice = answer(key, value) or ""
    typed = re.search(r"[Tt]ype ([\w.]+)=", advice)
    known = {field.name for field in dataclasses.fields(BenchmarkConfig)} | SYNONYMS.keys()
    return advice if typed and typed[1] in known else None


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """One comparison. Lists are words separated by spaces, such as algorithms="meshslice wang"."""

    explain: ClassVar = staticmethod(_explain)

    bench: str = "step"
    """What is measured or predicted: `step` (forward, backward, update), `layer` or `gemm` (the products of a block;
    forward, backward), `nongemm` (a layer without its products), `collectives` (fits launch time and bandwidth of
    links), `calibrate` (products, memory, launches and links, written to one file for calibration=), `data` (reading
    and writing token files), `tune` (the planner's ranking of meshes, with reasons) or `peers` (the step of mstrain,
    Flax, PyTorch and transformers on one device)."""
    models: str = "tiny"
    """Model presets, separated by spaces."""
    peers: str = "all"
    """With bench=peers: `mstrain`, `flax`, `torch` and `transformers`, separated by spaces, or `all`."""
    layers: int | None = None
    """Number of layers; null takes the preset's."""
    algorithms: str = "all"
    """Algorithms of `parallel=`, separated by spaces, or `all`."""
    meshes: str = "auto"
    """Meshes separated by spaces; `auto` is one mesh for the devices; `all`, with target=, is every mesh that its torus
    supports."""
    slices: str = "auto"
    """MeshSlice's slice count, or one for each product of a block (attention in and out, mlp in and out), or `auto`."""
    dataflow: str = "auto"
    """`os`, `ls`, `rs` or `auto`."""
    batch: int | None = None
    """Sequences per step of the whole job; null is one per device and microbatch, and as many as 32,768 tokens have
    with bench=peers."""
    seq: Automatic = None  # type: ignore
    """Tokens per sequence; null is 128, and the model's context with bench=peers."""
    dtype: str = "auto"
    """`bf16`, `f32`, or `auto` (bf16 on accelerators)."""
    precision: str = "bf16"
    """Operands of products, as in train.py: `bf16`, `int8` or `fp8`."""
    travel: str = "bf16"
    """Operands that are all-gathered, as in train.py: `bf16` or `int8`."""
    remat: str = "none"
    """Activation checkpointing, as in train.py: `none`, `dots`, `full`, or names joined by `+`; not `auto`."""
    accumulate: int = 1
    """Microbatches per step."""
    shard: str = "none"
    """What is sharded over data-parallel replicas, as in train.py: `none`, `optimizer`, `gradients` or `parameters`. No
    effect on meshes without data parallelism."""
    target: str | None = None
    """TPU slice such as v5p-64, or several slices (2xv5p-64), for which programs are compiled and predicted from their
    schedules. No TPU is needed. Null measures the devices present."""
    dump: str | None = None
    """Folder to which compiled programs are written as text, one file per row. Null writes none."""
    emulate: str | None = None
    """A larger mesh, such as 32x8. Batch, heads and widths are reduced so that shards of activations have the shapes
    that they have on that mesh."""
    preset: str | None = None
    """`v2` or `v3`: predicts the published results of transformer_shmap on that TPU generation."""
    repeats: int = 5
    """Number of timed executions, whose median is reported."""
    warmup: int = 2
    """Number of executions before the timed ones."""
    tune: str = "model"
    """With bench=tune: `model` (rank by the cost model) or `compile` (compile its best candidates for target= and rank
    them by their schedules)."""
    constants: str | None = None
    """Constants of the cost model: a file of bench=collectives or bench=calibrate, or a shipped one; null takes the
    chip's."""
    calibration: str | None = None
    """A calibration.json of bench=calibrate. Predictions of these devices use its measured rates."""
    check: bool = False
    """With bench=calibrate: print predicted and measured step times of ten small configurations."""
    seed: int = 0
    """Seed of the random arguments."""
    run_dir: str = "runs/benchmark"
    """Folder for tables."""

    def __post_init__(self):
        mounted("run_dir", self.run_dir)
        for key, allowed in (("bench", BENCHES), ("dtype", DTYPES), ("shard", SHARD), ("tune", TUNE)):
            one_of(key, getattr(self, key), allowed)
        if self.remat == AUTO:
            raise ValueError("remat=auto works with train.py only. Type remat=none or remat=full.")
        check_remat(self.remat, None)
        given = [key for key in ("layers", "batch", "seq") if getattr(self, key) is not None]
        at_least("", self, **dict.fromkeys([*given, "accumulate", "repeats", "warmup"], 1), seed=0)
        self._check_effect()
        if self.seq is None and self.bench != "peers":
            object.__setattr__(self, "seq", 128)
        if self.emulate:
            parse_mesh(self.emulate)
        if self.meshes not in ("auto", "all"):
            self.mesh_shapes
        if self.target:
            self.tpu_slice
        self.slice_counts
        self.algorithm_names
        self.peer_names

    @property
    def algorithm_names(self) -> list[str]:
        names = list(ALGORITHMS) if self.algorithms == "all" else self.algorithms.split()
        if not names:
            raise ValueError('algorithms= is empty. Type algorithms=all, or algorithms="meshslice wang".')
        return [find_algorithm(name).name for name in names]

    @property
    def peer_names(self) -> list[str]:
        names = list(PEERS) if self.peers == "all" else self.peers.split()
        for name in names:
            one_of("peers", name, PEERS)
        return names

    @property
    def products(self) -> Precision:
        """The precision of the layers' products."""
        return Precision(self.precision, self.travel)

    @property
    def parts(self) -> int:
        """Rows of one model on one mesh with one algorithm."""
        return len(PRODUCTS) if self.bench == "gemm" else 1

    @property
    def mesh_shapes(self) -> list[MeshShape]:
        """The meshes of `meshes`, which must not be `auto` or `all`."""
        shapes = [parse_mesh(text) for text in self.meshes.split()]
        if not shapes:
            raise ValueError('meshes= is empty. Type meshes=auto, or some such as meshes="2x4 4x2".')
        return shapes

    @property
    def tpu_slice(self) -> TpuSlice | None:
        """The absent TPU slice of `target`; None if the devices present are measured."""
        return parse_target(self.target) if self.target else None

    @property
    def slice_counts(self) -> tuple[int, ...] | None:
        """One slice count for each product of a block; None for `auto`."""
        if self.slices == "auto":
            return None
        words = self.slices.split()
        numbers = all(re.fullmatch(r"[1-9]\d{0,5}", word) for word in words)
        if len(words) not in (1, len(PRODUCTS)) or not numbers:
            raise ValueError(
                f"slices={self.slices!r} is neither one slice count nor {len(PRODUCTS)} (of {', '.join(PRODUCTS)}). "
                'Type slices=4, slices="8 8 8 8" or slices=auto.'
            )
        return tuple(map(int, words * (len(PRODUCTS) // len(words))))

    def sequences(self, devices: int) -> int:
        """Of a step on so many devices; raises ValueError if they do not divide into microbatches."""
        batch, parts = self.batch or devices * self.accumulate, self.accumulate
        if batch % parts:
            raise ValueError(
                f"batch={batch} does not divide into accumulate={parts} microbatches. "
                f"Type batch={-(-batch // parts) * parts}."
            )
        return batch

    @property
    def one_slice_count(self) -> int | None:
        """The slice count of all products for bench=tune; None for `auto`."""
        counts = self.slice_counts or (None,)
        if len(set(counts)) > 1:
            raise ValueError("bench=tune takes one slice count for all products. Type slices=8, or slices=auto.")
        return counts[0]

    @property
    def model_configs(self) -> list[ModelConfig]:
        """The models; those without a vocab_size get that of the bytes tokenizer."""
        if not self.models.split():
            raise ValueError("models= is empty. Type models=tiny (python train.py model=list shows all).")
        models = [load_preset(name, added("model")) for name in self.models.split()]
        experts = [model.name for model in models if model.experts]
        if experts and self.bench in ("gemm", "nongemm", "calibrate"):
            raise ValueError(
                f"bench={self.bench} measures dense layers, and {experts[0]} has experts. Type bench=layer, or another "
                "models=."
            )
        return [
            dataclasses.replace(m, vocab_size=m.vocab_size or BYTES, layers=self.layers or m.layers) for m in models
        ]

    def parallel(self, algorithm: str) -> ParallelConfig:
        """The parallelism of one algorithm; `dataflow` applies to algorithms with a choice of dataflows."""
        return ParallelConfig(algorithm, dataflow="auto" if find_algorithm(algorithm).only_dataflow else self.dataflow)

    def step_config(self, model: ModelConfig, batch: int, parallel: ParallelConfig, dtype) -> StepConfig:
        """The training step of one model, of `batch` sequences."""
        return StepConfig(
            model, batch, self.seq, parallel, self.accumulate, jnp.dtype(dtype).name, self.remat, shard=self.shard,
            products=self.products,
        )  # fmt: skip

    def _check_effect(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if self.bench in PRECISE or self.tune == "compile":
            names = self.algorithm_names if self.bench in PRECISE else ["meshslice"]
            for model in self.model_configs:
                check_precision(self.products, model, names)
        if self.tune == "compile" and (self.bench != "tune" or not self.target):
            raise ValueError("tune=compile needs bench=tune and a slice. Type bench=tune target=v5p-64.")
        for key in IDLE.get(self.bench, ()):
            effective = self.tune == "compile" and key in EIGHT_BITS
            if getattr(self, key) != defaults[key] and not effective:
                value = f"{key}={getattr(self, key)}"
                raise ValueError(f"{value} has no effect with bench={self.bench}. Remove it.")
        if self.peers != "all" and self.bench != "peers":
            raise ValueError(f"peers= has no effect with bench={self.bench}. Type bench=peers or remove it.")
        if self.target:
            idle = [key for key in ("emulate", "repeats", "warmup") if getattr(self, key) != defaults[key]]
            if idle and self.bench != "tune":
                raise ValueError(f"{idle[0]}= has no effect with target=, which measures nothing. Remove one of them.")
        else:
            if self.dump:
                raise ValueError("dump= needs target=, for which programs are compiled. Type target=v5p-64.")
            if self.meshes == "all":
                raise ValueError("meshes=all needs target=, whose torus determines them. Type target=v5p-64.")
        if self.constants and self.tune == "compile":
            raise ValueError("constants= has no effect with tune=compile, which reads schedules. Remove it.")
        if self.check and self.bench != "calibrate":
            raise ValueError(f"check=true has no effect with bench={self.bench}. Type bench=calibrate or remove it.")
        if self.constants and self.calibration:
            raise ValueError("constants= and calibration= are two sources of the same numbers. Remove one of them.")
        if self.calibration and self.tune == "compile":
            raise ValueError("calibration= has no effect with tune=compile, which reads schedules. Remove it.")
        if self.calibration and not (self.bench == "tune" or self.check):
            raise ValueError(
                f"calibration= has no effect with bench={self.bench}. Type bench=tune, or bench=calibrate check=true."
            )
        if self.constants and self.bench != "tune":
            raise ValueError(f"constants= has no effect with bench={self.bench}. Type bench=tune or remove it.")
        if self.bench != "tune":
            slices = "auto" if self.slices == "auto" else "1"
            check_effect(ParallelConfig(slices=slices, dataflow=self.dataflow), set(self.algorithm_names))


def load(arguments: list[str]) -> BenchmarkConfig:
    """Reads the command line, including train.py's names of keys; raises ValueError for an invalid argument."""
    arguments = [_plain(argument) for argument in arguments]
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    if preset := given.get("preset"):
        arguments += _absent(preset_arguments(preset), given)
    if given.get("bench") == "peers":
        arguments += _absent({"models": PEER_MODELS, "repeats": "20"}, given)
    return compose(BenchmarkConfig, "benchmark", arguments)


def _absent(values: dict[str, str], given: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items() if key not in given]


def _plain(argument: str) -> str:
    """The argument with the name of its key in benchmark.py, and lists such as [2x4,4x2] as words."""
    key, equals, value = argument.partition("=")
    key = SYNONYMS.get(key, key)
    if key in WORDS:
        value = value.strip().removeprefix("[").removesuffix("]").replace(",", " ")
    return f"{key}{equals}{value}"
