"""The table of chips (chips.toml), counted per JAX device."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

_NUMBERS = (
    "peak_bf16", "peak_f32", "hbm_bytes", "hbm_bandwidth", "ici_links", "ici_bandwidth",
    "launch_all_gather", "launch_reduce_scatter", "launch_permute", "sync",
    "node_devices", "node_bandwidth",
)


@dataclass(frozen=True)
class CompilerOption:
    """One XLA option with the reason for it and where its effect was read."""

    name: str
    value: bool | int | str
    reason: str
    source: str


@dataclass(frozen=True)
class TpuSliceRules:
    """How a generation's slices are named and shaped; shapes count chips along the torus axes."""

    prefixes: tuple[str, ...]
    name_counts_per_chip: int
    devices_per_chip: int
    shapes: tuple[str, ...]
    max_axis: int
    wrap_axis: int
    max_chips: int | None = None
    topology_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chip:
    """One JAX device. FLOP/s dense, bytes, bytes/s, seconds; None where nothing is published.

    `ici_bandwidth` is one way, per link; on GPUs the links are NVLink ports, and `torus_rank` is 0.
    `node_devices` share a host and its network of `node_bandwidth`, one way: of a TPU, the data-center network.
    `most_slices` is where automatic slice counts end: more cost cycles and copies that the cost model does not know.
    `lowering` are the fields of `mstrain.gemm.LoweringOptions` as its compiler wants them, `overlap` is what its
    compiler hides of a collective, as a key of `mstrain.hardware.constants.OVERLAPS`.
    `sources` names the origin of every number that is not None.
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
    lowering: Mapping[str, bool | int] = field(default_factory=dict, compare=False)
    overlap: str = "max"
    most_slices: int = 4
    tpu_slices: TpuSliceRules | None = field(default=None, compare=False)

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s for GeMMs of `dtype` ("bf16", "f32", or JAX's names); None when unknown."""
        known = {"bf16": self.peak_bf16, "f32": self.peak_f32}
        known |= {"bfloat16": self.peak_bf16, "float32": self.peak_f32}
        if dtype not in known:
            raise ValueError(f"no peak is kept for dtype {dtype!r}; use one of {', '.join(known)}")
        return known[dtype]


def _chip(name: str, entry: dict) -> Chip:
    numbers = entry.get("numbers", {})
    assert set(numbers) <= set(_NUMBERS), f"chips.toml: {name} has an unknown number"
    options = [CompilerOption(option, *row) for option, row in entry.get("compiler_options", {}).items()]
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
        options=tuple(options),
        **{key: entry[key][0] for key in ("overlap", "most_slices") if key in entry},
        lowering=MappingProxyType({key: value for key, (value, _) in entry.get("lowering", {}).items()}),
        tpu_slices=TpuSliceRules(**rules) if rules else None,
    )


@functools.cache
def all_chips() -> Mapping[str, Chip]:
    """Every chip of the table by its name: "v5p", "h200", "cpu", ..."""
    table = tomllib.loads(Path(__file__).with_name("chips.toml").read_text())
    return MappingProxyType({name: _chip(name, entry) for name, entry in table.items()})


def chip_for(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device.device_kind`; None when it is not in the table (never a near match)."""
    kind = device_kind.lower()
    return next((c for c in all_chips().values() if kind in (k.lower() for k in c.device_kinds)), None)


def chip_named(name: str) -> Chip:
    """The chip called `name` in the table; ValueError lists the names."""
    chips = all_chips()
    if name not in chips:
        raise ValueError(f"unknown chip {name!r}; known: {', '.join(chips)}")
    return chips[name]


def compiler_options(chip: Chip | None) -> dict[str, bool | int | str]:
    """XLA options for `jax.jit(...).lower(...).compile(compiler_options=...)` that let collectives overlap.

    Empty for an unknown chip. The reasons are in `chip.options`.
    """
    if chip is None:
        return {}
    return {option.name: option.value for option in chip.options}
