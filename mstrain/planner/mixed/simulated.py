"""Simulation of a plan for a mixed cluster: every device, and one link per node to the other nodes.

Times of layers are those of the profiles; one third is the forward pass. Unlike the cost model, which adds up terms,
the simulator computes how stages wait for each other, which messages share the link of a node, and which parts of the
batch generator and of the messages overlap with other work. Gradient sums follow the last backward pass of a stage, as
in the cost model, but a stage does not wait for those of other stages.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from mstrain.hardware.hosts import Hosts, Node
from mstrain.parallel.schedules import BACKWARD, FORWARD, schedule
from mstrain.planner.clock import Clock
from mstrain.planner.mixed.bounds import iteration_terms
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.result import Plan, StagePlan, named_counts
from mstrain.planner.mixed.space import node_labels
from mstrain.simulator.cluster import Cluster, Device, Network, Path, Wire
from mstrain.simulator.compared import Compared
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import GROUP, SEND, Degrees
from mstrain.simulator.program import OpSpec, timed
from mstrain.simulator.simulate import CORRECTED, place, simulate
from mstrain.timeline import device_use

FORWARD_PART = 1 / 3  # fraction of a profiled time (forward and backward) that the forward pass takes
GB = 1e9


@dataclass(frozen=True, eq=False)
class Nodes(Network):
    """The network of several nodes: one port per device within a node, one link per node between nodes."""

    nodes: tuple[Node, ...]
    node_of: tuple[int, ...]  # number of the node of each device
    latency: float  # seconds per message

    def path(self, source: int, destination: int) -> Path:
        wires, inside = [], self.node_of[source] == self.node_of[destination]
        for device, way in ((source, "out"), (destination, "in")):
            number = self.node_of[device]
            node, first = self.nodes[number], self.node_of.index(number)  # the trace shows a node's link at `first`
            own, shared = Wire(device, f"link {way}", node.intra_gb_s * GB), f"node {number} {way}"
            wires.append(own if inside else Wire(first, shared, node.inter_gb_s * GB))
        return Path(tuple(wires), min(wire.bandwidth for wire in wires), self.latency)


@dataclass(frozen=True)
class Replica:
    """A replica of a stage: its devices, its samples [begin, end) of a microbatch, and ms per microbatch.

    `compute_ms` and `tensor_ms` are sums over the forward and the backward pass.
    """

    devices: tuple[int, ...]
    begin: int
    end: int
    compute_ms: float
    tensor_ms: float


def mixed_cluster(hosts: Hosts, latency_ms: float) -> Cluster:
    """The simulated cluster, with devices in the order of the host file."""
    numbered = [(number, node) for number, node in enumerate(hosts.nodes) for _ in range(node.slots)]
    devices = tuple(Device(1.0, 1.0, node.memory_gb * GB, kind=node.device_type) for _, node in numbered)
    return Cluster(devices, Nodes(hosts.nodes, tuple(number for number, _ in numbered), 1e-3 * latency_ms))


def allocate(hosts: Hosts, stages: tuple[StagePlan, ...]) -> list[dict[str, tuple[int, ...]]]:
    """The devices of every stage by kind of node; the stages with most devices are placed first.

    Sizes are whole nodes, or parts of a node that divide each other, so that no part of a node spans two nodes.
    """
    free: dict[str, list[list[int]]] = {}
    begin = 0
    for node, label in zip(hosts.nodes, node_labels(hosts)):
        free.setdefault(label, []).append(list(range(begin, begin + node.slots)))
        begin += node.slots
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in stages]
    for label, nodes in sorted(free.items()):
        wanted = [(stage.devices[label], number) for number, stage in enumerate(stages) if label in stage.devices]
        for count, number in sorted(wanted, key=lambda pair: (-pair[0], pair[1])):
            taken: list[int] = []
            while len(taken) < count:
                missing = count - len(taken)
                node = min((n for n in nodes if len(n) >= min(missing, len(nodes[0]))), key=len)
                taken += node[:missing]
                del node[:missing]
                nodes[:] = sorted((n for n in nodes if n), key=len, reverse=True)
            found[number][label] = tuple(taken)
    return found


def replicas_of(stage: StagePlan, devices: dict[str, tuple[int, ...]], samples: int) -> list[Replica]:
    """The replicas of a stage in order, with the `samples` of a microbatch distributed over them."""
    if len(devices) > 1 and stage.tp == sum(map(len, devices.values())):  # one replica spans the kinds
        every = tuple(device for part in devices.values() for device in part)
        return [Replica(every, 0, samples, max(stage.type_ms.values()), max(stage.type_tensor_ms.values()))]
    replicas, begin = [], 0
    for label, mine in devices.items():
        for at in range(0, len(mine), stage.tp):
            end = min(samples, begin + stage.samples[label])
            times = stage.type_ms[label], stage.type_tensor_ms[label]
            replicas.append(Replica(mine[at : at + stage.tp], begin, end, *times))
            begin = end
    return replicas


class MixedStep(PipelineStep):
    """The step of a plan. Every device is one stage of the simulator; the stages of the plan are its chunks."""

    def __init__(self, plan: Plan, options: PlanOptions, hosts: Hosts, network: Nodes, microbatches: int):
        super().__init__(Degrees(pipeline=len(network.node_of), microbatches=microbatches), len(plan.stages))
        self.plan, self.options, self.network = plan, options, network
        self.devices = allocate(hosts, plan.stages)
        self.replicas = [
            replicas_of(stage, devices, plan.microbatch) for stage, devices in zip(plan.stages, self.devices)
        ]
        self.state = {
            device: self._state(stage, len(replicas), device)
            for stage, replicas in zip(plan.stages, self.replicas)
            for replica in replicas
            for device in replica.devices
        }
        # The last values of a pass, and the received values, by (direction, stage, replica).
        self.done: dict[tuple[int, int, int], list[int]] = {}
        self.arrived: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)

    def _state(self, stage: StagePlan, replicas: int, device: int) -> tuple[int, ...]:
        """Allocates parameters, gradients and optimizer state of a device; returns their numbers."""
        mine, factors = stage.parameter_bytes / stage.tp, self.options.state_factors(replicas).items()
        return tuple(self.slots.resident(round(factor * mine), device, name) for name, factor in factors)

    def _on_all(self, members, spec: OpSpec, inputs, label, nbytes: float = 0, category="workspace") -> list[int]:
        """Adds an operation on all of `members`, with an output of `nbytes` on each."""
        outputs = [self.slots.value(round(nbytes), device, category=category) for device in members]
        group = self.groups.setdefault(tuple(members), len(self.groups))
        self.add(spec, GROUP, members[0], inputs, outputs, group, label)
        return outputs

    def _timed(self, devices, kind: str, ms: float, inputs, label, *output) -> list[int]:
        """Adds an operation that takes `ms` milliseconds on all of `devices`."""
        return self._on_all(devices, timed(kind, 1e-3 * ms), inputs, label, *output)

    def _sum(self, members, nbytes: float, values, label) -> list[int]:
        """Adds an all-reduce of `nbytes` bytes over `members`."""
        return self._on_all(members, OpSpec("AllReduce", ((max(1, round(nbytes)),),), 1), values, label)

    def _by_node(self, members) -> dict[int, tuple[int, ...]]:
        """The devices of `members` in each node, by number of the node."""
        node_of = self.network.node_of
        return {
            node: tuple(d for d in members if node_of[d] == node) for node in dict.fromkeys(node_of[d] for d in members)
        }

    def _tensor_sums(self, replica: Replica, stage: StagePlan, values: list[int], label) -> list[int]:
        """Adds the tensor-parallel all-reduces of one pass that are not in the profiles, within and between nodes."""
        nodes, last = self._by_node(replica.devices).values(), self.options.num_layers - 1
        middle = sum(0 < layer < last for layer in range(stage.first_layer, stage.end_layer))
        message = (replica.end - replica.begin) * self.options.message_bytes
        groups = [] if self.options.collectives_in_profile else list(nodes)
        groups.append(tuple(node[0] for node in nodes))
        for members in groups * (2 * middle if message and replica.tensor_ms else 0):
            if len(members) > 1:
                values = [*values, *self._sum(members, message, values, label)]
        return values

    def forward(self, s: int) -> None:
        stage, label = self.plan.stages[s], ("layers", self.plan.stages[s].layers, "forward")
        for r, replica in enumerate(self.replicas[s]):
            inputs = self.arrived[FORWARD, s, r]
            if s == 0:
                ms = self.plan.generator_ms / self.plan.microbatches
                inputs = self._timed(replica.devices, "Profiled", ms, (), ("batch generator",))
            kept, ms = (replica.end - replica.begin) * stage.sample_bytes, FORWARD_PART * replica.compute_ms
            done = self._timed(replica.devices, "Profiled", ms, inputs, label, kept, "activations")
            self.done[FORWARD, s, r] = self._tensor_sums(replica, stage, done, label)

    def backward(self, s: int) -> None:
        stage, label = self.plan.stages[s], ("layers", self.plan.stages[s].layers, "backward")
        for r, replica in enumerate(self.replicas[s]):
            inputs = [*self.done[FORWARD, s, r], *self.arrived[BACKWARD, s, r]]
            ms = (1 - FORWARD_PART) * replica.compute_ms
            done = self._timed(replica.devices, "ProfiledGrad", ms, inputs, label)
            self.done[BACKWARD, s, r] = self._tensor_sums(replica, stage, done, label)

    def send(self, chunk: int, direction: int) -> None:
        """Sends the samples of every replica to the replicas of the next stage that process them."""
        to = chunk + (1 if direction == FORWARD else -1)
        for r, mine in enumerate(self.replicas[chunk] if 0 <= to < self.chunks else ()):
            for q, other in enumerate(self.replicas[to]):
                samples = min(mine.end, other.end) - max(mine.begin, other.begin)
                if samples > 0:
                    here, there, nbytes = mine.devices[0], other.devices[0], samples * self.options.message_bytes
                    arrival = self.slots.value(nbytes, there, category="workspace")
                    spec, values = OpSpec("Send", ((nbytes,),), 1), self.done[direction, chunk, r]
                    self.add(spec, SEND, here, values, (arrival,), there, ("to stage", to))
                    self.arrived[direction, to, q].append(arrival)

    def finish(self) -> None:
        """Adds the gradient sums over the replicas of every stage, and its update."""
        for s, (stage, replicas) in enumerate(zip(self.plan.stages, self.replicas)):
            label = "layers", stage.layers
            many = len(replicas) > 1
            sums = [self._gradient_sums(s, rank, (*label, "gradients")) for rank in range(stage.tp) if many]
            for r, replica in enumerate(replicas):
                state = [value for device in replica.devices for value in self.state[device]]
                whole = [by_node[self.network.node_of[device]] for device, by_node in zip(replica.devices, sums)]
                inputs = (*self.done[BACKWARD, s, r], *state, *whole)
                self._timed(replica.devices, "ProfiledUpdate", stage.update_ms, inputs, (*label, "update"))

    def _gradient_sums(self, s: int, rank: int, label) -> dict[int, int]:
        """Adds the gradient sums of one tensor-parallel rank over the replicas: within nodes, then between nodes.

        Returns the result of each node, by number of the node.
        """
        stage, sums = self.plan.stages[s], {}
        owner = {replica.devices[rank]: r for r, replica in enumerate(self.replicas[s])}
        nodes, nbytes = self._by_node(owner), stage.parameter_bytes / stage.tp
        for node, members in nodes.items():
            done = [self.done[BACKWARD, s, owner[device]] for device in members]
            values = [value for mine in done for value in (mine[rank], *mine[stage.tp :])]
            sums[node] = self._sum(members, nbytes, values, label)[0] if len(members) > 1 else values[-1]
        if len(nodes) > 1:
            leaders = [members[0] for members in nodes.values()]
            sums = dict(zip(sums, self._sum(leaders, nbytes, list(sums.values()), label)))
        return sums


def simulate_mixed(plan: Plan, options: PlanOptions, hosts: Hosts, clock: Clock | None = None) -> Compared:
    """Simulates the plan with at most `simulated_microbatches` of its microbatches, but with at least two per stage.

    The rows of the result have, for every stage, the ms per step in which a device computes or waits and the GB of its
    memory, by the cost model and by the simulator. Raises OutOfTime if the time left on the clock is too short.
    """
    stages = len(plan.stages)
    count = min(plan.microbatches, max(options.simulated_microbatches, 2 * stages))
    clock = clock or Clock()
    replicas = [sum(stage.replicas.values()) for stage in plan.stages]
    pairs = sum(mine * other for mine, other in itertools.pairwise(replicas))  # pairs that may send to each other
    clock.check(2 * count * (hosts.num_devices + pairs))  # a lower bound of the operations, before writing the program
    cluster = mixed_cluster(hosts, options.latency_ms)
    assert isinstance(cluster.network, Nodes)
    writer = MixedStep(plan, options, hosts, cluster.network, count)
    program = place(writer.write(schedule(options.schedule, stages, count, stages)), cluster, CORRECTED)
    clock.check(len(program.spec))
    result = simulate(program, cluster)
    slowest = max(stage.stage_ms for stage in plan.stages)
    terms = iteration_terms(count, slowest, plan.fill_ms, plan.end_ms, plan.generator_ms / plan.microbatches)
    predicted, generator = sum(terms), terms[-1]
    devices = tuple(tuple(sorted(d for part in found.values() for d in part)) for found in writer.devices)
    use = device_use(result.timeline())
    rows = []
    for number, (stage, mine) in enumerate(zip(plan.stages, devices)):
        longest = 1e3 * max(use[device].compute for device in mine)
        computed = count * (stage.compute_ms + stage.sync_ms) + stage.update_ms + generator * (number == 0)
        rows.append({
            "stage": number, "layers": stage.layers, "devices": named_counts(stage.devices, "="),
            "compute_ms": computed, "simulated_compute_ms": longest,
            "idle_ms": predicted - computed, "simulated_idle_ms": 1e3 * result.seconds - longest,
            "memory_gb": stage.state_gb + stage.activation_gb,
            "simulated_memory_gb": max(result.memory.peak_bytes[device] for device in mine) / GB,
        })  # fmt: skip
    memory = GB * max(row["memory_gb"] for row in rows)
    return Compared(result, count, 1e-3 * predicted, memory, devices, rows)
