"""TPU slices by cloud name or topology: their devices, torus axes and possible meshes."""

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mstrain.hardware.chips import Chip, all_chips, chip_for
from mstrain.hardware.torus_parts import Part, Parts

CUBE = 4  # chips along an edge of the cubes that optical switches connect (TPU v4 paper, section 2)


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice, or `count` equal ones joined by the data-center network.

    `topology` has the number of chips along each torus axis of one slice; `devices` is the number of JAX devices of all
    slices. `topology_name` and `topology_options` are arguments of `jax.experimental.topologies.get_topology_desc`.
    """

    name: str
    chip: Chip
    topology: tuple[int, ...]
    topology_name: str
    topology_options: dict[str, str] = field(default_factory=dict, compare=False)
    count: int = 1

    @property
    def devices(self) -> int:
        return self.count * math.prod(self.topology) * self.chip.slice_rules.devices_per_chip

    @property
    def one(self) -> "TpuSlice":
        """One of the slices; if there are several, its name is `topology_name`."""
        return self if self.count == 1 else replace(self, name=self.topology_name, count=1)

    @property
    def network(self) -> float:
        """Bytes/s in one direction of one slice on the data-center network; raises ValueError if it is unknown."""
        if self.chip.node_bandwidth is None:
            raise ValueError(f"The table of chips has no data-center network of {self.chip.name}.")
        return self.chip.node_bandwidth * self.one.devices / (self.chip.node_devices or 1)

    @property
    def physical_axes(self) -> tuple[int, ...]:
        """Devices along each torus axis longer than 1; several cores per chip are one more axis."""
        return tuple(n for n in (*self.topology, self.chip.slice_rules.devices_per_chip) if n > 1)

    @property
    def wraps(self) -> bool:
        """Whether every torus axis is a closed ring, on which collectives use both directions of the links."""
        wrap = self.chip.slice_rules.wrap_axis
        return all(n % wrap == 0 for n in self.topology)

    def ring(self, parts: Parts, collective: str) -> tuple[float, int]:
        """(number of links in one direction, number of steps) of a collective over parts of `physical_axes`.

        The collective uses all links of the parts, in both directions of a closed axis. Cores of a chip share its links
        ("How to Scale Your Model"), and so do groups of devices that alternate along an axis. Over several torus axes,
        some generations use one bidirectional ring through all devices instead: on open axes (`one_ring`), and in a
        reduce_scatter over all devices of their chips (`one_ring_scatters`).
        """
        rules, chips = self.chip.slice_rules, sum(n > 1 for n in self.topology)
        along = [part for part in parts if part.axis < chips]
        cores = rules.devices_per_chip if len(along) < len(parts) else 1
        scatters = rules.one_ring_scatters and collective == "reduce_scatter" and cores > 1
        if len(along) > 1 and (scatters or rules.one_ring and not self.wraps):
            return 2 * cores, math.prod(part.size for part in parts) - 1
        links = sum(2 if self._closed(part) else 1 for part in along) or 1
        return links * cores / max((part.stride for part in along), default=1), sum(part.size - 1 for part in parts)

    def _closed(self, part: Part) -> bool:
        """Whether a part of an axis is a closed ring of more than two devices, with two paths between any two."""
        return self.wraps and part.size > 2 and part.size * part.stride == self.physical_axes[part.axis]

    def mesh_shapes(self, data: int = 1) -> tuple[tuple[int, int], ...]:
        """The (rows, cols) of whole torus axes, with `data` data-parallel replicas; raises ValueError if none exist."""
        shapes = set()
        for owners in itertools.product(range(3), repeat=len(self.physical_axes)):  # data, row or col
            sizes = [1, 1, 1]
            for axis, owner in zip(self.physical_axes, owners):
                sizes[owner] *= axis
            if sizes[0] == data:
                shapes.add((sizes[1], sizes[2]))
        if not shapes:
            sizes = sorted(
                {
                    math.prod(s)
                    for n in range(len(self.physical_axes) + 1)
                    for s in itertools.combinations(self.physical_axes, n)
                }
            )
            raise ValueError(
                f"{self.name}: {data} data-parallel replicas do not divide into whole torus axes {self.physical_axes}; "
                f"use data={_nearest(data, sizes)} (possible: {', '.join(map(str, sizes))})"
            )
        return tuple(sorted(shapes))


def _nearest(value: int, options) -> int:
    return min(options, key=lambda option: (abs(option - value), option))


def _text(topology) -> str:
    return "x".join(map(str, topology))


@functools.cache
def _named_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Topology by the number in the cloud name. Large 3-D slices are the most cubic arrangement of 4x4x4 cubes."""
    rules = chip.slice_rules
    shapes = [tuple(map(int, shape.split("x"))) for shape in rules.shapes]
    if rules.max_chips:
        longest = rules.max_axis // CUBE
        for cubes in range(1, rules.max_chips // CUBE**3 + 1):
            fits = [
                (a, b, cubes // (a * b))
                for a in range(1, round(cubes ** (1 / 3)) + 1)
                if cubes % a == 0
                for b in range(a, math.isqrt(cubes // a) + 1)
                if (cubes // a) % b == 0
            ]
            best = min(fits, key=sum)
            if best[2] <= longest:
                shapes.append(tuple(CUBE * n for n in best))
    return {math.prod(shape) * rules.name_counts_per_chip: shape for shape in shapes}


def _check_topology(chip: Chip, topology: tuple[int, ...], text: str) -> None:
    rules = chip.slice_rules
    if len(topology) != chip.torus_rank:
        example = rules.shapes[-1]
        raise ValueError(f"{text!r}: {chip.name} is a {chip.torus_rank}-D torus; write it like {chip.name}:{example}")
    single = topology == (1, 1) and "1x1" in rules.shapes
    host = [2, 2, 1][: chip.torus_rank]
    near = tuple(min(max(1, round(n / h)) * h, rules.max_axis) for n, h in zip(topology, host))
    if not single and near != topology:
        raise ValueError(
            f"{text!r}: a host has {_text(host)} chips and an axis has at most {rules.max_axis}; "
            f"the nearest topology is {chip.name}:{_text(near)}"
        )
    limit = rules.max_chips or math.prod(map(int, rules.shapes[-1].split("x")))
    if math.prod(topology) > limit:
        largest = _text(max(_named_shapes(chip).values(), key=math.prod))
        raise ValueError(
            f"{text!r}: a {chip.name} slice has at most {limit} chips; the largest is {chip.name}:{largest}"
        )


def parse_target(text: str) -> TpuSlice:
    """The slice called `text`: a cloud name ("v4-64", "v5litepod-32") or a topology ("v5p:4x4x2"); "2xv5p-32" is two.

    v2, v3, v4, v5p and tpu7x names count cores, v5e and v6e names count chips.
    Raises ValueError, with the nearest slice, for an unknown name.
    """
    several = re.fullmatch(r"([1-9]\d{0,5})\s*x\s*([a-z].*)", text.strip().lower())
    if several and (count := int(several[1])) > 1:
        return replace(parse_target(several[2]), name=text.strip(), count=count)
    if several:
        return parse_target(several[2])
    chips = {prefix: chip for chip in all_chips().values() if chip.tpu_slices for prefix in chip.slice_rules.prefixes}
    match = re.fullmatch(r"(\w+?)(?:-(\d+)|:(\d+(?:x\d+)*))", text.strip().lower())
    if not match or match[1] not in chips:
        raise ValueError(
            f"Unknown TPU slice {text!r}. Type one of {', '.join(chips)} with -SIZE or :TOPOLOGY, "
            "such as v5p-64 or v5p:4x4x2."
        )
    chip = chips[match[1]]
    if match[3]:
        topology = tuple(map(int, match[3].split("x")))
        _check_topology(chip, topology, text)
    else:
        named, size = _named_shapes(chip), int(match[2])
        if size not in named:
            unit = "chips" if chip.slice_rules.name_counts_per_chip == 1 else "cores"
            near = _nearest(size, named)
            raise ValueError(
                f"Unknown TPU slice {text!r}: {chip.name} has no slice of {size} {unit}; "
                f"the nearest is {match[1]}-{near} ({_text(named[near])} chips)."
            )
        topology = named[size]
    return TpuSlice(text, chip, topology, f"{chip.name}:{_text(topology)}", dict(chip.slice_rules.topology_options))


def tpu_slice_of(devices: Sequence) -> TpuSlice | None:
    """The TPU slice that consists of JAX's `devices`, from their kind and coordinates; None if they are not a slice.

    Torus axes are sorted by length, as in the names of slices; their order does not matter for a mesh.
    """
    chip = chip_for(devices[0].device_kind)
    if chip is None or chip.tpu_slices is None:
        return None
    extents = [max(axis) - min(axis) + 1 for axis in zip(*(device.coords for device in devices), strict=True)]
    topology = "x".join(map(str, sorted(sorted(extents)[-chip.torus_rank :])))
    try:
        tpu_slice = parse_target(f"{chip.tpu_slices.prefixes[0]}:{topology}")
    except ValueError:
        return None
    return tpu_slice if tpu_slice.devices == len(devices) else None
