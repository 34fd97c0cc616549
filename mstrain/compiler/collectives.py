"""Which collective an instruction is, on which mesh axes it travels and how long that takes."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from mstrain.compiler.hlo import Instruction, Module
from mstrain.hardware import Link, collective_seconds
from mstrain.hardware.constants import AxisLinks

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What turns a schedule into seconds.

    Attributes:
      name: of the chip, for the picture.
      clock: cycles per second of the TensorCore.
      flops, hbm_bandwidth: FLOP/s and bytes/s that a custom kernel, for which XLA estimates nothing, is held
        to.
      axes: size of every mesh axis, in the order of the mesh.
      links: the links of each axis.
    """

    name: str
    clock: float
    flops: float
    hbm_bandwidth: float
    axes: Mapping[str, int]
    links: Mapping[str, AxisLinks]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one device: `bytes` it sends in each of the `participants - 1` steps of a ring."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    participants: int
    seconds: float


def find_collective(
    module: Module, computation: str, instruction: Instruction, machine: Machine
) -> Collective | None:
    """The collective that `instruction` is, starts or contains; None for none, or one among one device."""
    inside = [(computation, instruction), *module.within(instruction)]
    for where, found in inside:
        kind = found.opcode.removesuffix("-start")
        if kind in KINDS:
            kind = _true_kind(kind, instruction, [i for _, i in inside])
            return _collective(kind, found, _payload(module, where, found), machine)
    return None


def _true_kind(kind: str, instruction: Instruction, inside: list[Instruction]) -> str:
    """A fusion that sums everything and keeps its own part moves what a reduce-scatter moves."""
    fused = instruction.opcode == "fusion" and kind == "all-reduce"
    return "reduce-scatter" if fused and any(i.opcode == "dynamic-slice" for i in inside) else kind


def _payload(module: Module, computation: str, instruction: Instruction) -> int:
    operands = [module.find(computation, name) for name in instruction.operands]
    return sum(o.bytes for o in operands if o is not None)


def _collective(kind: str, instruction: Instruction, operand: float, machine: Machine) -> Collective | None:
    sizes = tuple(machine.axes.values())
    if kind == "collective-permute":
        axes, hops = _permuted_axes(instruction.attributes, machine)
        participants = 2
    else:
        group = replica_group(instruction.attributes, math.prod(sizes))
        places = np.array(np.unravel_index(group, sizes))
        axes = tuple(a for a, place in zip(machine.axes, places) if len(set(place.tolist())) > 1)
        participants, hops = len(group), 1
    if not axes:
        return None
    part = {"reduce-scatter": participants, "all-reduce": participants, "all-to-all": 4}.get(kind, 1)
    bytes = operand / part
    way = sum(machine.axes[axis] - 1 for axis in axes) / (participants - 1)
    seconds = 0.0
    for phase in _PHASES[kind]:
        links = [getattr(machine.links[axis], phase) for axis in axes]
        link = _slowest(links) if kind == "collective-permute" else _all_at_once(links, way)
        seconds += hops * collective_seconds(link, bytes, participants)
    return Collective(kind, axes, bytes, participants, seconds)


# An all-reduce scatters and gathers. An all-to-all loads each link with a quarter of what an all-gather of
# the same shards does ("How to Scale Your Model", sharding), hence the 4 above.
_PHASES = {
    "all-gather": ("all_gather",),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("reduce_scatter", "all_gather"),
    "collective-permute": ("permute",),
    "all-to-all": ("all_gather",),
}


def _slowest(links: list[Link]) -> Link:
    """A message goes one axis after the other."""
    return min(links, key=lambda link: link.bandwidth)


def _all_at_once(links: list[Link], way: float) -> Link:
    """Several axes: parts of the data go round them in different orders, so that the links of all axes carry, and
    the way is as long as the axes together, `way` of one ring ("How to Scale Your Model", sharding).
    """
    longest = max(links, key=lambda link: link.launch + link.sync)
    return Link(longest.launch, longest.sync * min(1.0, way), sum(link.bandwidth for link in links))


def replica_group(attributes: str, devices: int) -> list[int]:
    """The group of partition 0, from a list, an iota or a mesh form; all devices when none is printed."""
    text = re.search(r"replica_groups=(.*)", attributes)
    if not text or text[1].startswith("{}"):
        return list(range(devices))
    if match := re.match(r"\{\{([\d,]*)\}", text[1]):
        return _numbers(match[1])
    if match := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text[1]):
        return _iota(match[3], match[4])[: int(match[2])].tolist()
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"  # of the devices, when not ascending
    if match := re.match(rf"mesh\[('[^\]]*)\]{order} \{{('[^}}]*)\}}", text[1]):
        places = _mesh_group(match[1], match[4])
        return _iota(match[2], match[3])[places].tolist() if match[2] else places
    raise ValueError(f"a form of replica groups that is not known: {text[1][:80]!r}")


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """Ascending numbers in an array of `dims`, transposed and flattened."""
    numbers = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return numbers.transpose(_numbers(permutation) if permutation else None).reshape(-1)


def _mesh_group(mesh: str, axes: str) -> list[int]:
    """From "'a'=4,'b'=8" and "'b'", or "'b':(2)4": the part of size 4 of b behind its first factor 2."""
    stride, strides, sizes = 1, {}, {}
    for name, size in reversed(re.findall(r"'([^']+)'=(\d+)", mesh)):
        strides[name], sizes[name] = stride, int(size)
        stride *= int(size)
    group = np.zeros(1, int)
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        count = int(part or sizes[name])
        step = strides[name] * sizes[name] // (int(before or 1) * count)
        group = np.add.outer(group, np.arange(count) * step).reshape(-1)
    return group.tolist()


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _permuted_axes(attributes: str, machine: Machine) -> tuple[tuple[str, ...], int]:
    """Axes along which source and target differ, and the longest way round the ring of any message."""
    text = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)[1]
    pairs = np.array([[int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)", text)])
    places = np.array(np.unravel_index(pairs, tuple(machine.axes.values())))
    axes, hops = [], 1
    for (axis, size), place in zip(machine.axes.items(), places):
        shift = np.abs(place[:, 0] - place[:, 1])
        if shift.any():
            axes.append(axis)
            hops = max(hops, int(np.minimum(shift, size - shift).max()))
    return tuple(axes), hops
