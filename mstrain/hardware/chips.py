"""The table of chips (chips.toml). All numbers are per JAX device."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

_NUMBERS = (
    "peak_bf16",
    "peak_f32",
    "hbm_bytes",
    "hbm_bandwidth",
    "ici_links",
    "ici_bandwidth",
    "launch_all_gather",
    "launch_reduce_scatter",
    "launch_permute",
    "sync",
    "node_devices",
    "node_bandwidth",
)
# A step of `tiny` has 1.5e9 FLOPs. With `quick_options` it takes 0.38 CPU seconds instead of 0.24, but compiles in 1.1
# seconds instead of 5.7.
SHORT_FLOPS = 2e10  # FLOPs of a run on CPUs below which `quick_options` are used
FUSION = ("xla_cpu_use_fusion_emitters",)  # if disabled, the last bits of results depend on the shapes of shards
ONCE_VALUES = 1 << 24  # without optimization, compiling random numbers takes 1.5 s less, and a million 0.065 s more

JAX_NAMES = {"bf16": "bfloat16", "f32": "float32"}  # short name of a dtype -> JAX's name


def jax_name(dtype: str) -> str:
    """JAX's name of a dtype, such as bfloat16 for bf16."""
    return JAX_NAMES.get(dtype, dtype)


def element_bytes(dtype: str) -> int:
    """Bytes per element of `bf16` or `f32`, or of JAX's names. Raises KeyError for any other dtype."""
    return {"bfloat16": 2, "float32": 4}[jax_name(dtype)]


@dataclass(frozen=True)
class CompilerOption:
    """One XLA option with its reason and the source for its effect."""

    name: str
    value: bool | int | str
    reason: str
    source: str


@dataclass(frozen=True)
class TpuSliceRules:
    """Names and shapes of the slices of a TPU generation.

    Attributes:
      prefixes: prefixes of cloud names, such as `v5p`.
      name_counts_per_chip: how much one chip adds to the number in a cloud name: 2 if the name counts cores.
      devices_per_chip: JAX devices per chip.
      shapes: topologies with a cloud name, in chips along the torus axes, such as `4x4`.
      max_axis: largest number of chips along an axis.
      wrap_axis: an axis whose length is a multiple of it is a closed ring.
      max_chips: largest number of chips of a slice of 4x4x4 cubes; None if `shapes` are all shapes.
      one_ring: whether the compiler runs a collective over several open torus axes in one ring through all its devices.
      one_ring_scatters: the same for a reduce_scatter over several torus axes, open or closed, with all cores of their
        chips.
      topology_options: arguments of `jax.experimental.topologies.get_topology_desc`.
    """

    prefixes: tuple[str, ...]
    name_counts_per_chip: int
    devices_per_chip: int
    shapes: tuple[str, ...]
    max_axis: int
    wrap_axis: int
    max_chips: int | None = None
    one_ring: bool = False
    one_ring_scatters: bool = False
    topology_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chip:
    """One JAX device. Units: dense FLOP/s, bytes, bytes/s, seconds. A number is None if no value is published.

    `ici_bandwidth` is that of one link in one direction; on GPUs the links are NVLink ports, and `torus_rank` is 0.
    `node_devices` is the number of devices of a host, which share its network of `node_bandwidth` in one direction (on
    TPUs, the data-center network). `launch_*` and `sync` are the latencies of `mstrain.hardware.link.Link`.
    `most_slices` limits automatic slice counts, because the cost model omits some cycles and copies of more slices.
    `lowering` has fields of `mstrain.gemm.LoweringOptions` for its compiler. `overlap`, a key of
    `mstrain.hardware.constants.OVERLAPS`, states how its compiler overlaps collectives.
    `options` are XLA options; `algorithm_options` are added to them for programs of one algorithm.
    `sources` has the source of every number that is not None.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    torus_rank: int = 0
    peak_bf16: float | None = None
    peak_f32: float | None = None
    hbm_bytes: float | None = None
    hbm_bandwidth: float | None = None
    ici_links: int | None = None
    ici_bandwidth: float | None = None
    launch_all_gather: float | None = None
    launch_reduce_scatter: float | None = None
    launch_permute: float | None = None
    sync: float | None = None
    node_devices: int | None = None
    node_bandwidth: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    options: tuple[CompilerOption, ...] = ()
    algorithm_options: Mapping[str, tuple[CompilerOption, ...]] = field(default_factory=dict, compare=False)
    lowering: Mapping[str, Any] = field(default_factory=dict, compare=False)
    overlap: str = "max"
    most_slices: int = 4
    tpu_slices: TpuSliceRules | None = field(default=None, compare=False)

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s of GeMMs in `dtype` ("bf16", "f32", or JAX's names); None if it is not published.

        Raises ValueError for any other dtype.
        """
        known = {"bfloat16": self.peak_bf16, "float32": self.peak_f32}
        if jax_name(dtype) not in known:
            names = ", ".join((*JAX_NAMES, *known))
            raise ValueError(f"The table of chips has no peak for dtype {dtype!r}. Use one of {names}.")
        return known[jax_name(dtype)]

    def known_peak(self, dtype: str) -> float:
        """`peak`; raises ValueError if it is unknown."""
        peak = self.peak(dtype)
        if peak is None:
            raise ValueError(f"the table of chips has no peak for {self.name} in {dtype}")
        return peak

    def number(self, name: str) -> float:
        """The number called `name`, such as `hbm_bandwidth`; raises ValueError if it is unknown."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the table of chips has no {name} for {self.name}")
        return value

    @property
    def slice_rules(self) -> TpuSliceRules:
        """The names and shapes of its TPU slices; asserts that it comes in TPU slices."""
        assert self.tpu_slices is not None, f"{self.name} does not come in TPU slices"
        return self.tpu_slices


def _chip(name: str, entry: dict) -> Chip:
    numbers = entry.get("numbers", {})
    assert set(numbers) <= set(_NUMBERS), f"chips.toml: {name} has an unknown number"
    tables = entry.get("algorithm_options", {}).items()
    of_algorithms = {name: _options(rows) for names, rows in tables for name in names.split()}
    rules = dict(entry["tpu_slices"]) if "tpu_slices" in entry else None
    if rules:
        rules.update(prefixes=tuple(rules["prefixes"]), shapes=tuple(rules["shapes"]))
    return Chip(
        name=name,
        platform=entry["platform"],
        device_kinds=tuple(entry["device_kinds"]),
        torus_rank=entry.get("torus_rank", 0),
        **{key: value for key, (value, _) in numbers.items()},
        sources=MappingProxyType({key: source for key, (_, source) in numbers.items()}),
        options=_options(entry.get("compiler_options", {})),
        algorithm_options=MappingProxyType(of_algorithms),
        **{key: entry[key][0] for key in ("overlap", "most_slices") if key in entry},
        lowering=MappingProxyType({key: value for key, (value, _) in entry.get("lowering", {}).items()}),
        tpu_slices=TpuSliceRules(**rules) if rules else None,
    )


def _options(rows: dict) -> tuple[CompilerOption, ...]:
    return tuple(CompilerOption(name, *row) for name, row in rows.items())


@functools.cache
def all_chips() -> Mapping[str, Chip]:
    """All chips of the table by name, such as "v5p", "h200" or "cpu"."""
    table = tomllib.loads(Path(__file__).with_name("chips.toml").read_text())
    return MappingProxyType({name: _chip(name, entry) for name, entry in table.items()})


def chip_for(device_kind: str) -> Chip | None:
    """The chip whose JAX name is `device_kind`, ignoring case; None if it is not in the table."""
    kind = device_kind.lower()
    return next((c for c in all_chips().values() if kind in (k.lower() for k in c.device_kinds)), None)


def chip_named(name: str) -> Chip:
    """The chip called `name`; raises ValueError, with all names, if it is not in the table."""
    chips = all_chips()
    if name not in chips:
        raise ValueError(f"Unknown chip {name!r}. Choose one of {', '.join(chips)}.")
    return chips[name]


def quick_options() -> dict[str, bool | int]:
    """XLA options for CPUs that reduce the compilation time by two thirds or more and make programs slower.

    They change neither the partitioned program nor the precision of its products.
    """
    options: dict[str, bool | int] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    if tuple(map(int, version("jaxlib").split(".")[:3])) <= (0, 11, 0):  # later versions exit at unknown flags
        options |= dict.fromkeys(FUSION, False)
    return options


def once_options(platform: str, values: int, moves: bool = False) -> dict[str, bool | int]:
    """XLA options for a program that runs once and makes `values` numbers, such as initial parameters.

    `platform` is JAX's name. On CPUs the options halve the compilation time and triple the run time, so they are used
    only for few values. A program that only `moves` numbers gets options that compile faster still; they would change
    the last bits of computed numbers.
    """
    if platform != "cpu" or values > ONCE_VALUES:
        return {}
    options = quick_options()
    return options if moves else {name: value for name, value in options.items() if name not in FUSION}


def step_options(platform: str, flops: float) -> dict[str, bool | int]:
    """XLA options for the step of a run with `flops` FLOPs in all its steps, in addition to those of the chip.

    `platform` is JAX's name. On CPUs, a run that is shorter than the compilation of its step gets `quick_options`.
    """
    return quick_options() if platform == "cpu" and flops < SHORT_FLOPS else {}


def compiler_options(chip: Chip | None, algorithm: str | None = None) -> dict[str, bool | int | str]:
    """XLA options for `jax.jit(...).lower(...).compile(compiler_options=...)` that enable overlap of collectives.

    They are the options of the chip and those of `algorithm`, the algorithm of all products of the program (None if
    there are several). Empty for an unknown chip. `chip.options` and `chip.algorithm_options` state the reasons.
    """
    if chip is None:
        return {}
    options = (*chip.options, *chip.algorithm_options.get(algorithm or "", ()))
    return {option.name: option.value for option in options}
