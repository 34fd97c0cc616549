"""A plan for a mixed cluster, simulated: every device, every node's one link to the others.

Times of layers are those of the profiles, a third of them forward. What the cost model adds up and the
simulator finds out: how stages wait for each other, which messages share a node's link, what of the batch
generator and of the messages hides behind other work. Gradient sums follow the last backward pass of a
stage, as in the cost model, but stages need not wait for each other with them.
"""

from dataclasses import dataclass

from mstrain.planner.clock import Clock
from mstrain.planner.mixed.hosts import Hosts
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.result import Plan, StagePlan
from mstrain.planner.mixed.space import kind_labels, kind_of, kinds_of
from mstrain.simulator.cluster import Cluster, Device, Network, Path, Wire
from mstrain.simulator.compared import Compared
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import GROUP, SEND, Degrees, Placement
from mstrain.simulator.program import OpSpec
from mstrain.simulator.schedules import BACKWARD, FORWARD, schedule
from mstrain.simulator.simulate import Simulation, simulate
from mstrain.simulator.slots import RankOp

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


def mixed_cluster(hosts: Hosts, latency_ms: float) -> Cluster:
    """The devices in host file order."""
    nodes = hosts.nodes
    node_of = tuple(number for number, node in enumerate(nodes) for _ in range(node.slots))
    first = tuple(node_of.index(number) for number in range(len(nodes)))
    devices = tuple(
        Device(1.0, 1.0, node.memory_gb * GB, kind=node.device_type) for node in nodes for _ in range(node.slots)
    )
    inside, between = (
        tuple(rate * GB for rate in rates) for rates in zip(*((node.intra_gb_s, node.inter_gb_s) for node in nodes))
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


class MixedStep(PipelineStep):
    """The step of a plan. Every device is a stage of its own to the simulator; the stages of the plan are chunks."""

    def __init__(self, plan: Plan, options: PlanOptions, hosts: Hosts, network: Nodes, microbatches: int):
        super().__init__(Degrees(pipeline=len(network.node_of), microbatches=microbatches), len(plan.stages))
        self.plan, self.options, self.network = plan, options, network
        self.sample_bytes = options.sequence_length * options.hidden_size * options.element_bytes  # messages
        self.devices = allocate(hosts, plan.stages)
        self.replicas = [
            replicas_of(stage, devices, plan.microbatch) for stage, devices in zip(plan.stages, self.devices)
        ]
        self.groups: dict[tuple[int, ...], int] = {}  # members of an operation -> number
        self.state = {
            device: self._state(stage, len(replicas), device)
            for stage, replicas in zip(plan.stages, self.replicas)
            for replica in replicas
            for device in replica.devices
        }
        self.kept: dict[tuple[int, int], list[int]] = {}  # by stage and replica
        self.arrived: dict[tuple[int, int, int], list[int]] = {}  # by direction, stage and replica
        self.last: dict[tuple[int, int], list[int]] = {}  # by stage and replica: its backward pass

    def _state(self, stage: StagePlan, replicas: int, device: int) -> tuple[int, ...]:
        mine, options = stage.parameter_bytes / stage.tp, self.options
        optimizer = options.optimizer_factor / (replicas if options.shard_optimizer else 1)
        factors = {"parameters": 1.0, "gradients": options.gradient_factor, "optimizer": optimizer}
        return tuple(self.slots.resident(round(factor * mine), device, name) for name, factor in factors.items())

    def _add(self, ops: list[RankOp], spec: OpSpec, members, inputs, nbytes: float, category: str, label) -> list[int]:
        """An operation on all of `members`, with an output of `nbytes` on each."""
        outputs = [self.slots.value(round(nbytes), device, category=category) for device in members]
        group = self.groups.setdefault(tuple(members), len(self.groups))
        ops.append(RankOp(spec, GROUP, members[0], tuple(inputs), tuple(outputs), group, label))
        return outputs

    def _timed(self, ops, kind: str, ms: float, devices, inputs, nbytes: float, category: str, label) -> list[int]:
        spec = OpSpec(kind, ((round(1e6 * ms),),), 0)
        return self._add(ops, spec, devices, inputs, nbytes, category, label)

    def _sum(self, ops, members, nbytes: float, values, label) -> list[int]:
        spec = OpSpec("AllReduce", ((max(1, round(nbytes)),),), 1)
        return self._add(ops, spec, members, values, 0, "workspace", label)

    def _by_node(self, members) -> list[tuple[int, ...]]:
        """The members in groups of one node."""
        nodes: dict[int, tuple[int, ...]] = {}
        for device in members:
            nodes[self.network.node_of[device]] = (*nodes.get(self.network.node_of[device], ()), device)
        return list(nodes.values())

    def _tensor_sums(self, ops, replica: Replica, stage: StagePlan, values: list[int], label) -> list[int]:
        """The all-reduces of one pass that the profiles lack: inside nodes and between them."""
        if replica.tensor_ms == 0:
            return values
        last = self.options.num_layers - 1
        middle = sum(0 < layer < last for layer in range(stage.first_layer, stage.end_layer))
        message, nodes = (replica.end - replica.begin) * self.sample_bytes, self._by_node(replica.devices)
        inside = [] if self.options.collectives_in_profile else nodes
        for _ in range(2 * middle if message else 0):
            for members in (*inside, tuple(node[0] for node in nodes)):
                if len(members) > 1:
                    values = [*values, *self._sum(ops, members, message, values, label)]
        return values

    def forward(self, s: int) -> list[RankOp]:
        stage, ops, label = self.plan.stages[s], [], (*_part(self.plan.stages[s]), "forward")
        for r, replica in enumerate(self.replicas[s]):
            devices, inputs = replica.devices, self.arrived.get((FORWARD, s, r), [])
            if s == 0:
                ms = self.plan.generator_ms / self.plan.microbatches
                inputs = self._timed(ops, "Profiled", ms, devices, (), 0, "workspace", ("batch generator",))
            kept, ms = (replica.end - replica.begin) * stage.sample_bytes, FORWARD_PART * replica.compute_ms
            done = self._timed(ops, "Profiled", ms, devices, inputs, kept, "activations", label)
            self.kept[s, r] = self._tensor_sums(ops, replica, stage, done, label)
        return ops

    def backward(self, s: int) -> list[RankOp]:
        stage, ops, label = self.plan.stages[s], [], (*_part(self.plan.stages[s]), "backward")
        for r, replica in enumerate(self.replicas[s]):
            inputs = [*self.kept[s, r], *self.arrived.get((BACKWARD, s, r), [])]
            ms = (1 - FORWARD_PART) * replica.compute_ms
            done = self._timed(ops, "ProfiledGrad", ms, replica.devices, inputs, 0, "workspace", label)
            self.last[s, r] = self._tensor_sums(ops, replica, stage, done, label)
        return ops

    def send(self, chunk: int, direction: int) -> list[RankOp]:
        """The samples of every replica to those replicas of the next stage that continue with them."""
        to, ops = chunk + (1 if direction == FORWARD else -1), []
        for r, mine in enumerate(self.replicas[chunk] if 0 <= to < self.chunks else ()):
            values = (self.kept if direction == FORWARD else self.last)[chunk, r]
            for q, other in enumerate(self.replicas[to]):
                samples = min(mine.end, other.end) - max(mine.begin, other.begin)
                if samples > 0:
                    here, there, nbytes = mine.devices[0], other.devices[0], samples * self.sample_bytes
                    arrival = self.slots.value(nbytes, there, category="workspace")
                    spec, label = OpSpec("Send", ((nbytes,),), 1), ("to stage", to)
                    ops.append(RankOp(spec, SEND, here, tuple(values), (arrival,), there, label))
                    self.arrived.setdefault((direction, to, q), []).append(arrival)
        return ops

    def finish(self) -> list[RankOp]:
        """Gradient sums over the replicas of every stage, and its update."""
        ops: list[RankOp] = []
        for s, (stage, replicas) in enumerate(zip(self.plan.stages, self.replicas)):
            label = _part(stage)
            many = len(replicas) > 1
            sums = [self._gradient_sums(ops, s, rank, label) for rank in range(stage.tp) if many]
            for r, replica in enumerate(replicas):
                inputs = [*self.last[s, r], *(value for device in replica.devices for value in self.state[device])]
                inputs += [by_node[self.network.node_of[replica.devices[rank]]] for rank, by_node in enumerate(sums)]
                self._timed(
                    ops, "ProfiledUpdate", stage.update_ms, replica.devices, inputs, 0, "workspace", (*label, "update")
                )
        return ops

    def _gradient_sums(self, ops, s: int, rank: int, label) -> dict[int, int]:
        """Sums over the replicas of what one tensor rank has: inside nodes, then between them; by node."""
        stage, label, sums = self.plan.stages[s], (*label, "gradients"), {}
        owner = {replica.devices[rank]: r for r, replica in enumerate(self.replicas[s])}
        nodes, nbytes = self._by_node(owner), stage.parameter_bytes / stage.tp
        for members in nodes:
            node = self.network.node_of[members[0]]
            done = [self.last[s, owner[device]] for device in members]
            values = [value for mine in done for value in (mine[rank], *mine[stage.tp :])]
            whole = self._sum(ops, members, nbytes, values, label)[0] if len(members) > 1 else values[-1]
            sums[node] = whole
        if len(nodes) > 1:
            leaders = tuple(members[0] for members in nodes)
            sums = dict(zip(sums, self._sum(ops, leaders, nbytes, list(sums.values()), label)))
        return sums


def _part(stage: StagePlan) -> tuple[str, str]:
    return "layers", stage.layers


def simulate_mixed(plan: Plan, options: PlanOptions, hosts: Hosts, clock: Clock | None = None) -> Compared:
    """Simulate the plan with at most `simulated_microbatches` of its microbatches, two per stage at least.

    Raises OutOfTime when the clock leaves too little time for it.
    """
    stages = len(plan.stages)
    count = min(plan.microbatches, max(options.simulated_microbatches, 2 * stages))
    cluster = mixed_cluster(hosts, options.latency_ms)
    assert isinstance(cluster.network, Nodes)
    writer = MixedStep(plan, options, hosts, cluster.network, count)
    step = writer.write(schedule(options.schedule, stages, count, stages))
    program = step.expand(Placement(writer.degrees, groups=tuple(writer.groups)))
    (clock or Clock()).check(len(program.spec))
    result = simulate(program, cluster)
    slowest = max(stage.stage_ms for stage in plan.stages)
    generator = plan.generator_ms * count / plan.microbatches
    predicted = (count - 1) * slowest + plan.fill_ms + plan.end_ms + generator
    devices = tuple(tuple(sorted(d for part in found.values() for d in part)) for found in writer.devices)
    rows = [_stage_row(plan, number, count, predicted, result, mine) for number, mine in enumerate(devices)]
    memory = GB * max(row["memory_gb"] for row in rows)
    return Compared(result, count, 1e-3 * predicted, memory, devices, rows)


def _stage_row(plan: Plan, number: int, microbatches: int, step_ms: float, result: Simulation, devices) -> dict:
    """Cost model beside simulator: ms of a step a device of the stage computes or waits, GB of its memory."""
    stage, busy = plan.stages[number], result.compute_seconds
    longest = 1e3 * max(busy[device] for device in devices)
    predicted = microbatches * (stage.compute_ms + stage.sync_ms) + stage.update_ms
    if number == 0:
        predicted += plan.generator_ms * microbatches / plan.microbatches
    return {
        "stage": number,
        "layers": stage.layers,
        "devices": " ".join(f"{name}={count}" for name, count in stage.devices.items()),
        "compute_ms": predicted,
        "simulated_compute_ms": longest,
        "idle_ms": step_ms - predicted,
        "simulated_idle_ms": 1e3 * result.seconds - longest,
        "memory_gb": stage.state_gb + stage.activation_gb,
        "simulated_memory_gb": max(result.memory.peak_bytes[device] for device in devices) / GB,
    }
