"""A plan for a mixed cluster, simulated: every device, every node's one link to the others.

Times of layers are those of the profiles, a third of them forward. What the cost model adds up and the
simulator finds out: how stages wait for each other, which messages share a node's link, what of the batch
generator and of the messages hides behind other work. Gradient sums follow the last backward pass of a
stage, as in the cost model, but stages need not wait for each other with them.
"""

from dataclasses import dataclass

from mstrain.planner.mixed.hosts import Hosts
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.result import Plan, StagePlan
from mstrain.planner.mixed.space import kind_labels, kind_of, kinds_of
from mstrain.simulator.cluster import Cluster, Device, Network, Path, Wire
from mstrain.simulator.program import OpSpec, ProgramBuilder
from mstrain.simulator.schedules import FORWARD, schedule
from mstrain.simulator.simulate import Simulation, simulate

FORWARD_PART = 1 / 3  # of a profiled forward and backward pass
GB = 1e9


@dataclass(frozen=True, eq=False)
class Nodes(Network):
    """Devices of several nodes: a port per device inside a node, one link per node between them (bytes/s).

    Wires 2d and 2d + 1 are out of and into device d, then come those of the nodes.
    """

    node_of: tuple[int, ...]
    first: tuple[int, ...]  # device of each node, where its link is drawn
    inside: tuple[float, ...]  # by node
    between: tuple[float, ...]
    latency: float

    def wire(self, number: int) -> Wire:
        at, inward = divmod(number, 2)
        way = ("out", "in")[inward]
        if at < len(self.node_of):
            return Wire(at, f"link {way}", self.inside[self.node_of[at]])
        node = at - len(self.node_of)
        return Wire(self.first[node], f"node {node} {way}", self.between[node])

    def path(self, source: int, destination: int) -> Path:
        here, there = self.node_of[source], self.node_of[destination]
        if here == there:
            return Path((2 * source, 2 * destination + 1), self.inside[here], self.latency)
        devices = len(self.node_of)
        wires = 2 * (devices + here), 2 * (devices + there) + 1
        return Path(wires, min(self.between[here], self.between[there]), self.latency)


@dataclass(frozen=True)
class Replica:
    """One copy of a stage's layers: its devices, samples [begin, end) of a microbatch, and ms per pass."""

    devices: tuple[int, ...]
    begin: int
    end: int
    compute_ms: float
    tensor_ms: float


@dataclass(frozen=True)
class SimulatedPlan:
    """A simulated step with `microbatches` of the plan's, and what the cost model says of as many."""

    result: Simulation
    microbatches: int
    predicted_ms: float
    devices: tuple[tuple[int, ...], ...]  # by stage

    @property
    def ms(self) -> float:
        return 1e3 * self.result.seconds


def mixed_cluster(hosts: Hosts, latency_ms: float) -> Cluster:
    """The devices in host file order."""
    nodes = hosts.nodes
    node_of = tuple(number for number, node in enumerate(nodes) for _ in range(node.slots))
    first = tuple(node_of.index(number) for number in range(len(nodes)))
    devices = tuple(
        Device(1.0, 1.0, node.memory_gb * GB, kind=node.device_type)
        for node in nodes
        for _ in range(node.slots)
    )
    inside, between = (
        tuple(rate * GB for rate in rates)
        for rates in zip(*((node.intra_gb_s, node.inter_gb_s) for node in nodes))
    )
    return Cluster(devices, Nodes(node_of, first, inside, between, 1e-3 * latency_ms))


def allocate(hosts: Hosts, stages: tuple[StagePlan, ...]) -> list[dict[str, tuple[int, ...]]]:
    """The devices of every stage by kind: whole nodes first, then parts of nodes, largest first.

    Sizes are parts of a node in a chain of divisors or whole nodes, so nothing straddles.
    """
    kinds = kinds_of(hosts)
    labels = kind_labels(kinds)
    free: dict[str, list[list[int]]] = {label: [] for label in labels}
    begin = 0
    for node in hosts.nodes:
        free[labels[kinds.index(kind_of(node, kinds))]].append(list(range(begin, begin + node.slots)))
        begin += node.slots
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in stages]
    for label, nodes in free.items():
        wanted = [
            (stage.devices[label], number) for number, stage in enumerate(stages) if label in stage.devices
        ]
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
    """The replicas of a stage in order, the samples of a microbatch shared out among them."""
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


class _Writer:
    """Writes down the step of a plan, pass by pass."""

    def __init__(self, plan: Plan, options: PlanOptions, hosts: Hosts, cluster: Cluster):
        self.plan, self.options, self.network = plan, options, cluster.network
        self.sample_bytes = options.sequence_length * options.hidden_size * options.element_bytes  # messages
        self.build = ProgramBuilder(1)
        self.devices = allocate(hosts, plan.stages)
        self.replicas = [
            replicas_of(stage, devices, plan.microbatch) for stage, devices in zip(plan.stages, self.devices)
        ]
        self.state: dict[int, tuple[int, ...]] = {}  # by device
        for number, stage in enumerate(plan.stages):
            sharded = len(self.replicas[number]) if options.shard_optimizer else 1
            mine = stage.parameter_bytes / stage.tp
            factors = {"parameters": 1.0, "gradients": options.gradient_factor}
            factors["optimizer"] = options.optimizer_factor / sharded
            for replica in self.replicas[number]:
                for device in replica.devices:
                    self.state[device] = tuple(
                        self.build.input((round(factor * mine),), device, category=name)
                        for name, factor in factors.items()
                    )
        self.kept: dict[tuple, list[int]] = {}  # by stage, replica and microbatch
        self.arrived: dict[tuple, list[int]] = {}  # by direction, stage, replica and microbatch
        self.last: dict[tuple, list[int]] = {}  # by stage and replica: its latest backward pass

    def timed(self, kind: str, ms: float, devices, inputs, nbytes: float, category, microbatch, label):
        """An operation of `ms` on all of `devices`, with an output of `nbytes` on each."""
        spec = OpSpec(kind, ((round(1e6 * ms),),), 0)
        outputs = [((round(nbytes),), device) for device in devices]
        return list(self.build.add(spec, devices, inputs, outputs, category, microbatch, label))

    def collective(self, members, nbytes: float, values, microbatch, label) -> list[int]:
        spec = OpSpec("AllReduce", ((max(1, round(nbytes)),),), 1)
        outputs = [((0,), device) for device in members]
        return list(self.build.add(spec, members, values, outputs, "workspace", microbatch, label))

    def tensor_sums(self, replica: Replica, stage: StagePlan, values, m: int, label) -> list[int]:
        """The all-reduces of one pass that the profiles lack: inside nodes and between them."""
        if replica.tensor_ms == 0:
            return values
        last = self.options.num_layers - 1
        middle = sum(0 < layer < last for layer in range(stage.first_layer, stage.end_layer))
        message = (replica.end - replica.begin) * self.sample_bytes
        by_node: dict[int, list[int]] = {}
        for device in replica.devices:
            by_node.setdefault(self.network.node_of[device], []).append(device)
        for _ in range(2 * middle if message else 0):
            if not self.options.collectives_in_profile:
                for members in by_node.values():
                    if len(members) > 1:
                        values = [*values, *self.collective(tuple(members), message, values, m, label)]
            leaders = tuple(members[0] for members in by_node.values())
            if len(leaders) > 1:
                values = [*values, *self.collective(leaders, message, values, m, label)]
        return values

    def forward(self, s: int, m: int) -> None:
        stage = self.plan.stages[s]
        for r, replica in enumerate(self.replicas[s]):
            inputs, label = self.arrived.get((FORWARD, s, r, m), []), (*_part(stage), "forward")
            if s == 0:
                ms = self.plan.generator_ms / self.plan.microbatches
                inputs = self.timed(
                    "Profiled", ms, replica.devices, (), 0, "workspace", m, ("batch generator",)
                )
            kept = (replica.end - replica.begin) * stage.sample_bytes
            ms = FORWARD_PART * replica.compute_ms
            done = self.timed("Profiled", ms, replica.devices, inputs, kept, "activations", m, label)
            self.kept[s, r, m] = self.tensor_sums(replica, stage, done, m, label)
            self.send(s, s + 1, r, m, FORWARD, self.kept[s, r, m])

    def backward(self, s: int, m: int) -> None:
        stage = self.plan.stages[s]
        for r, replica in enumerate(self.replicas[s]):
            inputs = [*self.kept[s, r, m], *self.arrived.get((1 - FORWARD, s, r, m), [])]
            ms, label = (1 - FORWARD_PART) * replica.compute_ms, (*_part(stage), "backward")
            done = self.timed("ProfiledGrad", ms, replica.devices, inputs, 0, "workspace", m, label)
            done = self.tensor_sums(replica, stage, done, m, label)
            self.last[s, r] = done
            self.send(s, s - 1, r, m, 1 - FORWARD, done)

    def send(self, s: int, to: int, r: int, m: int, direction: int, values) -> None:
        """The samples of a replica to those replicas of the stage `to` that go on with them."""
        if not 0 <= to < len(self.plan.stages):
            return
        mine = self.replicas[s][r]
        for q, other in enumerate(self.replicas[to]):
            samples = min(mine.end, other.end) - max(mine.begin, other.begin)
            if samples > 0:
                here, there = mine.devices[0], other.devices[0]
                nbytes, label = samples * self.sample_bytes, ("to stage", to)
                spec, outputs = OpSpec("Send", ((nbytes,),), 1), [((nbytes,), there)]
                arrived = self.build.add(spec, (here, there), values, outputs, "workspace", m, label)
                self.arrived.setdefault((direction, to, q, m), []).extend(arrived)

    def finish(self, s: int) -> None:
        """Gradient sums over the replicas, and the update."""
        stage, replicas, label = self.plan.stages[s], self.replicas[s], _part(self.plan.stages[s])
        many = len(replicas) > 1
        sums = [self.gradient_sums(s, rank, (*label, "gradients")) for rank in range(stage.tp) if many]
        for r, replica in enumerate(replicas):
            inputs = [
                *self.last[s, r],
                *(value for device in replica.devices for value in self.state[device]),
            ]
            for rank, by_node in enumerate(sums):
                inputs.append(by_node[self.network.node_of[replica.devices[rank]]])
            ms, devices = stage.update_ms, replica.devices
            self.timed("ProfiledUpdate", ms, devices, inputs, 0, "workspace", -1, (*label, "update"))

    def gradient_sums(self, s: int, rank: int, label) -> dict[int, int]:
        """Sums over the replicas of what one tensor rank has: inside nodes, then between them; by node."""
        stage, replicas = self.plan.stages[s], self.replicas[s]
        by_node: dict[int, list[int]] = {}
        for r, replica in enumerate(replicas):
            by_node.setdefault(self.network.node_of[replica.devices[rank]], []).append(r)
        nbytes, sums = stage.parameter_bytes / stage.tp, {}
        for node, mine in by_node.items():
            values = [value for r in mine for value in (self.last[s, r][rank], *self.last[s, r][stage.tp :])]
            sums[node] = values[-1]
            if len(mine) > 1:
                members = tuple(replicas[r].devices[rank] for r in mine)
                sums[node] = self.collective(members, nbytes, values, -1, label)[0]
        if len(by_node) > 1:
            leaders = tuple(replicas[mine[0]].devices[rank] for mine in by_node.values())
            sums = dict(zip(by_node, self.collective(leaders, nbytes, list(sums.values()), -1, label)))
        return sums


def _part(stage: StagePlan) -> tuple[str, str]:
    return "layers", stage.layers


def simulate_mixed(plan: Plan, options: PlanOptions, hosts: Hosts) -> SimulatedPlan:
    """Simulate the plan with at most `simulated_microbatches` of its microbatches, two per stage at least."""
    stages = len(plan.stages)
    count = min(plan.microbatches, max(options.simulated_microbatches, 2 * stages))
    cluster = mixed_cluster(hosts, options.latency_ms)
    writer = _Writer(plan, options, hosts, cluster)
    for tasks in schedule(options.schedule, stages, count, stages):
        for task in tasks:
            (writer.forward if task.direction == FORWARD else writer.backward)(task.stage, task.microbatch)
    for number in range(stages):
        writer.finish(number)
    result = simulate(writer.build.build(), cluster)
    slowest = max(stage.stage_ms for stage in plan.stages)
    generator = plan.generator_ms * count / plan.microbatches
    predicted = (count - 1) * slowest + plan.fill_ms + plan.end_ms + generator
    devices = tuple(tuple(sorted(d for part in found.values() for d in part)) for found in writer.devices)
    return SimulatedPlan(result, count, predicted, devices)


def stage_rows(plan: Plan, simulated: SimulatedPlan) -> list[dict]:
    """Cost model beside simulator by stage: ms of a step a device computes or waits, GB of its memory."""
    result, rows = simulated.result, []
    busy = result.compute_seconds
    for number, (stage, devices) in enumerate(zip(plan.stages, simulated.devices)):
        longest = 1e3 * max(busy[device] for device in devices)
        predicted = simulated.microbatches * (stage.compute_ms + stage.sync_ms) + stage.update_ms
        if number == 0:
            predicted += plan.generator_ms * simulated.microbatches / plan.microbatches
        rows.append(
            {
                "stage": number,
                "layers": stage.layers,
                "devices": " ".join(f"{name}={count}" for name, count in stage.devices.items()),
                "compute_ms": predicted,
                "simulated_compute_ms": longest,
                "idle_ms": simulated.predicted_ms - predicted,
                "simulated_idle_ms": simulated.ms - longest,
                "memory_gb": stage.state_gb + stage.activation_gb,
                "simulated_memory_gb": max(result.memory.peak_bytes[device] for device in devices) / GB,
            }
        )
    return rows
