"""The collective of an instruction: its kind, the links that it uses, and its time."""

import dataclasses
import json
import math
import re

import numpy as np

from mstrain.compiler.hlo import Instruction, Module, hbm_bytes_of_shape
from mstrain.compiler.machine import Machine
from mstrain.compiler.torus import DIM_NAMES, NETWORK, Lane, Rings, Torus
from mstrain.gemm.copies import REPLICA
from mstrain.hardware import Link, collective_seconds

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one device.

    Attributes:
      kind: one of `KINDS`.
      axes: mesh axes along which its devices differ.
      bytes: sent in each of the `participants - 1` steps of a ring.
      participants: devices of a group; 2 for a permute.
      seconds: on free links.
      lanes: directions of links that it occupies.
      hbm_bytes: read from and written to the device's HBM by the transfer itself.
      cores: SparseCores that run it (`Machine.in_order`); none for one that the TensorCore runs.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    participants: int
    seconds: float
    lanes: tuple[Lane, ...]
    hbm_bytes: float
    cores: tuple[int, ...] = ()


def find_collective(module: Module, computation: str, instruction: Instruction, machine: Machine) -> Collective | None:
    """The collective that `instruction` is, starts or contains; None for none, or one among one device."""
    inside = [(computation, instruction), *module.within(instruction)]
    for where, found in inside:
        kind = found.opcode.removesuffix("-start")
        if kind in KINDS:
            kind = _true_kind(kind, instruction, [i for _, i in inside])
            if kind == "collective-permute":
                return _permute(module, where, found, machine)
            collective = _collective(kind, found, _payload(module, where, found), machine)
            return collective and dataclasses.replace(collective, cores=_sparse_cores(instruction.attributes))
    return None


def _sparse_cores(attributes: str) -> tuple[int, ...]:
    """Those to which the compiler offloads an instruction."""
    ids = re.search(r'"offload":"OFFLOAD_COLLECTIVE".*?"core_ids":\[([^\]]*)\]', attributes)
    return tuple(int(core) for core in re.findall(r"\d+", ids[1])) if ids else ()


def _true_kind(kind: str, instruction: Instruction, inside: list[Instruction]) -> str:
    """The kind by the bytes that are sent: a fusion that sums everything and keeps its own part counts as a
    reduce-scatter."""
    fused = instruction.opcode == "fusion" and kind == "all-reduce"
    return "reduce-scatter" if fused and any(i.opcode == "dynamic-slice" for i in inside) else kind


def _payload(module: Module, computation: str, instruction: Instruction) -> int:
    operands = [module.find(computation, name) for name in instruction.operands]
    return sum(o.bytes for o in operands if o is not None)


def _collective(kind: str, instruction: Instruction, operand: float, machine: Machine) -> Collective | None:
    sizes = tuple(machine.axes.values())
    group = replica_group(instruction.attributes, math.prod(sizes))
    axes, participants = _axes_of(group, machine), len(group)
    if not axes:
        return None
    part = {"reduce-scatter": participants, "all-reduce": participants, "all-to-all": 4}.get(kind, 1)
    bytes = operand / part
    rings = find_rings(instruction.attributes, group, machine.torus)
    seconds = hbm = 0.0
    for phase in _PHASES[kind]:
        link = getattr(machine.link, phase)
        way = rings.steps / (participants - 1)
        split = Link(link.launch, link.sync * way, link.bandwidth * rings.links)
        seconds += collective_seconds(split, bytes, participants)
        hbm += _HBM_ACCESSES[phase] * (participants - 1) * bytes
    return Collective(kind, axes, bytes, participants, seconds, rings.lanes, hbm)


# An all-reduce scatters and gathers. An all-to-all loads each link with a quarter of what an all-gather of
# the same shards does ("How to Scale Your Model", sharding), hence the 4 above.
_PHASES = {
    "all-gather": ("all_gather",),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("reduce_scatter", "all_gather"),
    "all-to-all": ("all_gather",),
}
# How often each received byte passes the device's HBM: written and read to be sent on; a sum reads the device's own
# part as well.
_HBM_ACCESSES = {"all_gather": 2, "reduce_scatter": 3}


def find_rings(attributes: str, group: list[int], torus: Torus) -> Rings:
    """The rings that the compiler chose, where it prints them; otherwise rings that use all links.

    The SparseCore prints colors: each carries an equal share of the data in one direction, through its rings one after
    the other. The TensorCore prints the name of an emitter: `1D` is one ring through all devices.
    """
    key = '"ici_strategy_config":'
    if (begin := attributes.find(key)) >= 0:
        strategy = json.JSONDecoder().raw_decode(attributes, begin + len(key))[0]
        colors = [color["phase_rings"] for color in strategy.get("color_strategies", [])]
        if colors and all(colors):
            return _rings_of_colors(colors, group, torus)
    if re.search(r'"emitter":"1D(AllGather|ReduceScatter|AllReduce)', attributes):
        return torus.one_ring(group)
    return torus.rings(group)


def _rings_of_colors(colors: list[list[dict]], group: list[int], torus: Torus) -> Rings:
    rings = [[_ring(ring) for ring in color] for color in colors]
    found = [[ring for ring in color if ring is not None] for color in rings]
    if found != rings:  # a ring that follows no dim, through all devices
        whole = torus.one_ring(group)
        both = sum(2 if ring.get("ring_type") == "ICI_RING_TYPE_BIDIR" else 1 for ring, *_ in colors)
        return Rings(whole.links * min(both, 2) / 2, whole.steps, whole.lanes)
    links = min(share for color in found for _, _, share in color) * len(found) / torus.sharing(group)
    steps = max(sum(steps for steps, _, _ in color) for color in found)
    used = dict.fromkeys(lane for color in found for _, lanes, _ in color for lane in lanes)
    return Rings(links, steps, tuple(lane for lane in used if lane in torus.lanes))


def _ring(ring: dict) -> tuple[int, tuple[Lane, ...], float] | None:
    """Steps, lanes and links' bandwidth of one ring; None for one that follows no dim.

    On an open line (`MESH`) the message that closes the ring takes the other direction, so that the two rings of a
    line have one link together.
    """
    dim = re.fullmatch(r"ICI_RING_DIM_([XYZ])_(TORUS|MESH)", ring.get("explicit_strategy_ring_dim", ""))
    if not dim or "core_count" not in ring:
        return None
    number, size, closed = DIM_NAMES.index(dim[1].lower()), int(ring["core_count"]), dim[2] == "TORUS"
    way = {"ICI_RING_TYPE_UNIDIR_CW": 1, "ICI_RING_TYPE_UNIDIR_CCW": -1}.get(ring.get("ring_type", ""))
    if way is None:  # both directions at once
        return size // 2, ((number, 1), (number, -1)), 2.0 if closed else 1.0
    lanes = ((number, way),) if closed else ((number, way), (number, -way))
    return size - 1, lanes, 1.0 if closed else 0.5


def across_slices(module: Module, computation: str, send: Instruction, machine: Machine) -> Collective:
    """The collective that a `send` to the host starts, among the devices at the same position in all TPU slices. The
    host's runtime executes it: every device sends the parts of a ring over the network of its slice.
    """
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.attributes)
    kind = (transfer[1] if transfer else "ALL_REDUCE").lower().replace("_", "-")
    kind = kind if kind in KINDS else "collective-permute"
    count, network = machine.axes[REPLICA], machine.torus.network
    assert network, f"{send.name} leaves the slice, and the target has one"
    operand = _payload(module, computation, send)
    bytes = operand / (count if kind in ("reduce-scatter", "all-reduce", "all-to-all") else 1)
    seconds = len(_PHASES.get(kind, ("",))) * collective_seconds(network, bytes, count)
    return Collective(kind, (REPLICA,), bytes, count, seconds, (NETWORK,), 2 * operand)


def _permute(module: Module, computation: str, instruction: Instruction, machine: Machine) -> Collective | None:
    """Messages are cut through: their bytes cross the busiest link one after the other, and hops cost a sync each."""
    text = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.attributes)
    assert text is not None, f"{instruction.name} has no pairs"
    pairs = tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", text[1]))
    axes = _axes_of(pairs, machine)
    if not axes:
        return None
    load, hops = machine.torus.route(pairs)
    link, bytes = machine.link.permute, _payload(module, computation, instruction)
    seconds = link.launch + hops * link.sync + max(load.values()) * bytes / link.bandwidth
    read = sum(hbm_bytes_of_shape(o.shape) for n in instruction.operands if (o := module.find(computation, n)))
    written = hbm_bytes_of_shape(instruction.shape)
    if instruction.opcode.endswith("-start"):  # its shape is (operand, result, ...)
        written -= read
    return Collective("collective-permute", axes, bytes, 2, seconds, tuple(sorted(load)), read + max(0.0, written))


def _axes_of(devices, machine: Machine) -> tuple[str, ...]:
    """Mesh axes along which the devices of a group, or the two of any pair, differ."""
    places = np.array(np.unravel_index(np.atleast_2d(devices), tuple(machine.axes.values())))
    return tuple(axis for axis, place in zip(machine.axes, places) if (place != place[:, :1]).any())


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
