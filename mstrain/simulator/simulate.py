"""Simulates a program on a cluster: start and end of each operation, live memory of each device, and a timeline.

An operation starts when its inputs exist and all its lanes are free, and holds these lanes until it ends. A lane is the
compute unit of a device or one direction of a link. Devices compute in program order. With `rules.link_lanes`, a
message holds the links that it crosses, which process messages in the order in which they become ready; otherwise it
holds the compute lanes of its devices, as in DistIR.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from mstrain.simulator.cluster import Cluster
from mstrain.simulator.costs import Rules, operation_work
from mstrain.simulator.kernels import first_come
from mstrain.simulator.memory import MemoryUse, memory_use
from mstrain.simulator.placement import Placement
from mstrain.simulator.program import CATEGORIES, Program, Ragged, distinct
from mstrain.simulator.replicas import Step
from mstrain.timeline import LIVE_MEMORY, Counter, Lane, Timeline

CORRECTED = Rules()


def _actions(program: Program, cluster: Cluster, rules: Rules) -> tuple[list[Lane], np.ndarray, Ragged, np.ndarray]:
    """The lanes of a program, and what its operations do on them.

    An action is a distinct pair of spec and group. Returns the lanes (compute of every device, then links), the action
    of each operation, the lanes of each action, and the seconds for which it holds each of them.
    """
    pairs, action = np.unique(program.spec * len(program.groups) + program.group, return_inverse=True)
    compute, links = {device: number for number, device in enumerate(program.devices)}, {}
    held, seconds = [], []
    cost: dict[tuple[int, int], float] = {}  # by id: hashing a device takes longer than this cost
    for spec, group in zip(*(part.tolist() for part in np.divmod(pairs, len(program.groups)))):
        what, members = program.specs[spec], program.groups[group]
        if what.communicates and rules.link_lanes:
            network = cluster.network
            wires = network.path(*members).wires if what.kind == "Send" else network.ring_wires(members)
            kept = [wire for wire in wires if wire.device in compute]
            held.append([links.setdefault(wire, len(compute) + len(links)) for wire in kept])
        else:
            held.append([compute[device] for device in members if device in compute])
        if what.communicates:
            duration = rules.communication_seconds(what, members, cluster)
            each = duration if isinstance(duration, tuple) else [duration] * len(held[-1])
            seconds.extend(np.nan if value is None else value for value in each)
            continue
        for device in members:
            key = (spec, id(cluster.devices[device]))
            if key not in cost:
                cost[key] = rules.compute_seconds(what, cluster.devices[device])
            seconds.append(cost[key])
    lists = Ragged.of(held)
    assert len(lists.items) == len(seconds), "an operation with a duration per member must keep all members"
    names = {device: f"{cluster.devices[device].kind} {device}" for device in compute}
    lanes = [Lane(device, name, "compute") for device, name in names.items()]
    lanes += [Lane(wire.device, names[wire.device], wire.name) for wire in links]
    return lanes, action, lists, np.array(seconds)


def _per_operation(action: np.ndarray, held: Ragged, seconds: np.ndarray) -> tuple[Ragged, np.ndarray]:
    """The lanes that each operation holds, and the seconds of each."""
    return held.take(action), held._replace(items=seconds).take(action).items


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated step; times are float arrays in seconds. `Program` describes operations and devices.

    Attributes:
      start, end: start and end of each operation, shape (ops,).
      lane_end: end of the last operation on each lane, shape (lanes,).
      action: int array of shape (ops,), the action of each operation: its distinct pair of spec and group.
      held, action_seconds: the lanes that each action holds, and for how long (NaN: no event is recorded).
    """

    program: Program
    rules: Rules
    lanes: tuple[Lane, ...]
    start: np.ndarray
    end: np.ndarray
    lane_end: np.ndarray
    action: np.ndarray
    held: Ragged
    action_seconds: np.ndarray

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return float(self.lane_end.max(initial=0.0))

    def _memory(self, counted: np.ndarray | None = None) -> MemoryUse:
        return memory_use(self.program, self.start if self.rules.link_lanes else self.end, self.end, counted)

    @cached_property
    def memory(self) -> MemoryUse:
        """Live memory per device over time."""
        return self._memory()

    @cached_property
    def memory_by_category(self) -> dict[str, MemoryUse]:
        """Live memory per device over time, by category; empty for a program without categories."""
        category = self.program.category
        present = [] if category is None else np.unique(category).tolist()
        return {CATEGORIES[index]: self._memory(category == index) for index in present}

    @property
    def peak_bytes(self) -> int:
        """Peak of live memory on the fullest device."""
        return max(self.memory.peak_bytes.values(), default=0)

    def timeline(self) -> Timeline:
        """Events on lanes, each with kind, shapes, bytes, FLOPs and microbatch of its operation, and live memory."""
        program, specs = self.program, self.program.specs
        taken, seconds = _per_operation(self.action, self.held, self.action_seconds)
        kept = ~np.isnan(seconds)
        op = taken.owner()[kept]
        spec = program.spec[op]
        name, names = distinct([item.kind for item in specs])
        shapes = [" ".join("x".join(map(str, shape)) for shape in item.shapes[:2]) for item in specs]
        args = {
            "shape": np.array(shapes, dtype=object)[spec],
            "bytes": np.array([sum(map(prod, item.shapes)) * item.element_bytes for item in specs])[spec],
            "flops": np.array([operation_work(item) for item in specs])[spec],
            "microbatch": np.where(program.microbatch < 0, np.nan, program.microbatch)[op],
        }
        if program.label is not None:
            parts = np.array([" ".join(map(str, label)) for label in program.labels], dtype=object)
            args["part"] = parts[program.label[op]]
        args["flow"] = np.where([item.kind == "Send" for item in specs], 1, -1)[spec] * (op + 1)
        counters = tuple(
            Counter(device, what, time, value)
            for what, use in {LIVE_MEMORY: self.memory, **self.memory_by_category}.items()
            for device, (time, value) in use.timelines().items()
        )
        communicates = np.array([item.communicates for item in specs])[spec]
        lane, duration = taken.items[kept], seconds[kept]
        return Timeline(self.lanes, names, lane, name[spec], self.start[op], duration, communicates, args, counters)


def simulate(program: Program, cluster: Cluster, rules: Rules = CORRECTED) -> Simulation:
    """Simulates `program` on `cluster` under `rules`. Raises ValueError for an operation without a cost rule."""
    assert max(program.devices, default=-1) < len(cluster.devices), "the program has devices that the cluster lacks"
    lanes, action, held, seconds = _actions(program, cluster, rules)
    taken, durations = _per_operation(action, held, seconds)
    ordered = len(program.devices) if rules.link_lanes else len(lanes)
    counts = len(lanes), len(program.value_bytes), ordered
    start, end, lane_end = first_come(taken, durations, program.inputs, program.outputs, *counts)
    assert not np.isnan(end).any(), "operations wait for each other: the program is not in topological order"
    return Simulation(program, rules, tuple(lanes), start, end, lane_end, action, held, seconds)


def place(step: Step, cluster: Cluster, rules: Rules) -> Program:
    """The program of `step` on the devices of `cluster`. Raises ValueError if the cluster has too few."""
    placement = Placement(step.degrees, rules.axis_order, rules.first)
    workers = range(placement.first, placement.first + step.degrees.world)
    if workers.stop > len(cluster.devices):
        raise ValueError(
            f"{step.degrees} needs devices {workers.start} to {workers.stop - 1}, the cluster has "
            f"{len(cluster.devices)}; lower the degrees" + (" (device 0 is the root)" if rules.first else "")
        )
    return step.program(placement)


def simulate_step(step: Step, cluster: Cluster, rules: Rules = CORRECTED) -> Simulation:
    """Simulates `step` on `cluster`. Raises ValueError if the cluster has too few devices."""
    return simulate(place(step, cluster, rules), cluster, rules)
