"""The space of plans: the devices that a stage may have, and how it may divide them into replicas.

A stage has whole *units* of devices: a part of a node from a chain of divisors (8, 4, 2, 1), or 1, 2, 3, 4, 6, 8, 12,
... or all nodes of a kind. So a stage with part of a node never spans two nodes. A stage with several kinds of nodes
has replicas that each use one kind, or one replica that spans all kinds. Devices may stay idle.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mstrain.hardware.hosts import Hosts, Node
from mstrain.planner.mixed.options import PlanOptions

LARGEST_TABLE = 2**31  # bytes
VISITS_PER_SECOND = 4e9  # upper bound of the inner iterations of `least_totals` per second, on a fast core


@dataclass(frozen=True)
class Kind:
    """All nodes with the same device type, slots, bandwidths (GB/s) and memory (GB per device)."""

    name: str  # device type
    devices: int  # in all nodes of the kind
    slots: int  # devices per node
    intra_gb_s: float
    inter_gb_s: float
    memory_gb: float


@dataclass(frozen=True)
class Choice:
    """The devices of a stage and how it uses them."""

    devices: tuple[int, ...]  # by kind
    tp: int  # tensor-parallel degree
    replicas: tuple[int, ...]  # by kind; zeros if one replica spans all kinds
    spans: bool = False  # whether one replica spans all kinds

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return 1 if self.spans else sum(self.replicas)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Numbers of the kinds of which the stage has devices."""
        return tuple(kind for kind, count in enumerate(self.devices) if count)


def _kind(node: Node) -> tuple:
    return node.device_type, node.slots, node.intra_gb_s, node.inter_gb_s, node.memory_gb


def kinds_of(cluster: Hosts) -> tuple[Kind, ...]:
    """The kinds of nodes of a cluster, sorted, so that the order of the host file does not matter."""
    counts = Counter(map(_kind, cluster.nodes))
    return tuple(Kind(kind[0], number * kind[1], *kind[1:]) for kind, number in sorted(counts.items()))


def node_labels(cluster: Hosts) -> list[str]:
    """The label of the kind of each node, as in `kind_labels`."""
    labels = dict(zip(sorted({*map(_kind, cluster.nodes)}), kind_labels(kinds_of(cluster))))
    return [labels[_kind(node)] for node in cluster.nodes]


def kind_labels(kinds: tuple[Kind, ...]) -> tuple[str, ...]:
    """The device type of each kind; types with several kinds of nodes have a number appended."""
    names = [kind.name for kind in kinds]
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    )


def divisor_chain(slots: int) -> list[int]:
    """`slots`, and the results of dividing it repeatedly by its smallest prime factor, down to 1."""
    factor = next((factor for factor in range(2, slots + 1) if slots % factor == 0), 0)
    return [slots, *divisor_chain(slots // factor)] if factor else [slots]


def choose_unit(options: PlanOptions, kinds: tuple[Kind, ...]) -> int:
    """Devices per unit: `options.unit`, or the smallest one with which there are at most `max_states` states.

    Raises ValueError for a unit that does not divide every kind of node, and if every unit has too many states.
    """
    common = sorted(set.intersection(*(set(divisor_chain(kind.slots)) for kind in kinds)))
    if options.unit and options.unit not in common:
        parts = ", ".join(map(str, common))
        raise ValueError(f"unit={options.unit}: choose a part that every node can be divided into: {parts}, or 0")
    states = {unit: math.prod(kind.devices // unit + 1 for kind in kinds) for unit in common}
    for unit in [options.unit] if options.unit else common:
        if options.unit or states[unit] <= options.max_states:
            return unit
    raise ValueError(
        f"the cluster has more than max_states={options.max_states} combinations of stage sizes, "
        f"even in units of {common[-1]} devices; {_fix(options, kinds, common[-1], states[common[-1]])}"
    )


def _fix(options: PlanOptions, kinds: tuple[Kind, ...], unit: int, states: int) -> str:
    """The part of the error message that says what to type for so many `states`, if `check_size` accepts them."""
    *_, table, seconds = _demand(options, kinds, unit)
    fewer = "plan for fewer kinds of nodes"
    if table > LARGEST_TABLE:
        return f"a table of them takes {table / 1e9:.1f} GB: {fewer}"
    budget = f" max_seconds={math.ceil(seconds)}" if seconds > options.max_seconds else ""
    return f"type max_states={states}{budget} (the time grows with it) or {fewer}"


def check_size(options: PlanOptions, kinds: tuple[Kind, ...], unit: int) -> None:
    """Raises ValueError if a table of the space is too large, or if its first bound takes longer than the time budget.

    A bound visits every range of layers, size of a stage and state (`mstrain.planner.mixed.bounds`).
    """
    sizes, states, table, seconds = _demand(options, kinds, unit)
    if table > LARGEST_TABLE or seconds > options.max_seconds:
        raise ValueError(
            f"unit={unit} gives {sizes:,} sizes of a stage and {states:,} states of the cluster, too many for memory "
            f"or for max_seconds={options.max_seconds:g}: a table takes {table / 1e9:.1f} GB, a bound {seconds:.0f} s. "
            "Type a larger unit=, or unit=0 without max_states=, raise max_seconds, or plan for fewer kinds of nodes."
        )


def _demand(options: PlanOptions, kinds: tuple[Kind, ...], unit: int) -> tuple[int, int, int, float]:
    """(sizes of a stage, states of the cluster, bytes of the largest table, seconds of the first bound)."""
    sizes = math.prod(len(stage_sizes(kind, unit)) + 1 for kind in kinds)
    counts = [kind.devices // unit for kind in kinds]
    states = (counts[0] + 1) * math.prod(2 * count + 1 for count in counts[1:])
    table = sizes * max(sizes, states, len(kinds) * math.prod(count + 1 for count in counts))
    return sizes, states, table, options.num_layers**2 / 2 * sizes * states / VISITS_PER_SECOND


def stage_sizes(kind: Kind, unit: int) -> list[int]:
    """Numbers of devices of a kind that a stage may have, ascending: parts of a node, and whole nodes."""
    nodes = kind.devices // kind.slots
    counts = {count for power in range(nodes.bit_length()) for count in (1 << power, 3 << power)} | {nodes}
    sizes = {part for part in divisor_chain(kind.slots) if part >= unit and part % unit == 0}
    sizes |= {count * kind.slots for count in counts if count <= nodes}
    return sorted(sizes)


def choices(kinds: tuple[Kind, ...], unit: int, degrees: list[set[int]]) -> Iterator[Choice]:
    """All choices of a stage; `degrees` are the tensor-parallel degrees with profiles, by kind."""
    for devices in itertools.product(*([0] + stage_sizes(kind, unit) for kind in kinds)):
        present = [index for index, count in enumerate(devices) if count]
        for tp in sorted(set.intersection(*(degrees[index] for index in present))) if present else ():
            if all(fits(kinds[index], devices[index], tp) for index in present):
                yield Choice(devices, tp, tuple(count // tp for count in devices))
            if len(present) > 1 and tp == sum(devices):
                yield Choice(devices, tp, (0,) * len(kinds), spans=True)


def fits(kind: Kind, devices: int, tp: int) -> bool:
    """Whether replicas of `tp` devices use all `devices`, and each is within a node or fills whole nodes."""
    part = min(devices, kind.slots)
    return devices % tp == 0 and (part % tp == 0 or tp % kind.slots == 0)


def nodes_per_replica(kinds: tuple[Kind, ...], choice: Choice, kind: int) -> int:
    """Number of nodes of one replica; a replica that spans kinds has all nodes of the stage."""
    if choice.spans:
        return sum(-(-choice.devices[index] // kinds[index].slots) for index in choice.kinds)
    return max(1, choice.tp // kinds[kind].slots)
