"""Best-first branch and bound over pipelines, from the last stage to the first.

A label is the tail of a pipeline: the stages that run the layers from some layer to the last, and the devices that
remain. The lower bound of a label is that of its tail plus an exact relaxation of the remaining head
(`mstrain.planner.mixed.bounds`). Labels are expanded in order of their bounds, so the first complete plans are the best
ones, and the search ends with a certificate: no plan of the space is cheaper than the bound. A label is dropped if
`top_k` others with the same remaining layers and devices are at least as good in every term; the top k stay exact.
"""

import heapq
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import check_layers, profile_name, read_profiles
from mstrain.planner.clock import Clock
from mstrain.planner.mixed.bounds import child_costs, iteration_terms, least_totals
from mstrain.planner.mixed.cost import Model, build_model
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.result import Certificate, OptimalResult, report_plan
from mstrain.planner.mixed.space import check_size, choices, choose_unit, kinds_of
from mstrain.planner.mixed.tables import Box, Space, Tables, build_space, build_tables, quick_bound, usable_stages
from mstrain.planner.mixed.times import degrees_of


def plan_optimal(
    hostfile: str | Path, clusterfile: str | Path, profile_dir: str | Path, options: PlanOptions,
    clock: Clock | None = None,
) -> OptimalResult:  # fmt: skip
    """The `top_k` cheapest plans of the space and a certificate.

    `clock` has the time budget; by default that of `options.max_seconds`. Raises ValueError, with the file and the fix,
    for invalid input, and if no plan fits the cluster or none was found in time.
    """
    clock = clock or Clock(options.max_seconds)
    cluster = read_hosts(hostfile, clusterfile)
    profiles = read_profiles(profile_dir, cluster.device_types)
    check_layers(profiles, options.num_layers, ["layer_ms", "parameter_bytes"])
    for key, profile in profiles.items():
        if not sum(profile.parameter_bytes) > 0:
            raise ValueError(f"{profile_name(key)}: parameters_per_layer_bytes adds up to 0; write every layer's bytes")
    kinds = kinds_of(cluster)
    unit = choose_unit(options, kinds)
    check_size(options, kinds, unit)
    model = build_model(options, kinds, profiles)
    degrees = [degrees_of(profiles, kind.name, options.max_tp) for kind in kinds]
    return Search(model, build_space(model, unit, tuple(choices(kinds, unit, degrees))), clock).run()


SETUP_PART = 0.5  # fraction of the time budget for the first bounds
SHRINK = 0.7  # a box is reduced without halving if a side becomes shorter than this fraction
NARROW = 0.01  # width of a box, as a fraction of the bound, up to which its labels are expanded instead of halving it


@dataclass(frozen=True)
class Label:
    """The tail of a pipeline: its stages run layers `begin` to the last, and the devices of `state` remain.

    `slowest`, `total` and `finish` are its slowest stage, sum of stages and longest exchange and update, in ms.
    """

    box: Box
    begin: int
    state: int
    slowest: float = 0.0
    total: float = 0.0
    finish: float = 0.0
    stages: tuple[tuple[int, int, int], ...] = ()  # (choice, an index into the stages of the tables, begin, end)

    @property
    def signature(self) -> tuple[int, ...]:
        """The sorted choices of the stages; plans with equal signatures count as one plan."""
        return tuple(sorted(choice for choice, _, _ in self.stages))


class Search:
    """One search; `run` may be called once. The queue has microbatch sizes, boxes and labels in order of bounds."""

    def __init__(self, model: Model, space: Space, clock: Clock):
        self.model, self.space, self.clock = model, space, clock
        self.order = itertools.count()
        self.queue: list[tuple] = []
        self.found: list[tuple[float, tuple, Label]] = []  # cost, signature, plan: the cheapest top_k
        self.num_expanded = 0

    @property
    def limit(self) -> float:
        """Ms that a plan must be below to be among the top k."""
        return self.found[-1][0] if len(self.found) == self.model.options.top_k else np.inf

    def run(self) -> OptimalResult:
        """Processes the queue until the k-th plan costs no more than every bound, or the time budget is spent."""
        finished, bound = True, np.inf
        # If the first bounds spend their part of the budget, some microbatch sizes have none; the result is then 0.
        setup = SETUP_PART * self.clock.budget
        for samples, microbatches in self.model.options.microbatches():
            if self.clock.seconds > setup:
                finished = False
                break
            stages = usable_stages(self.model, self.space, samples)
            if stages:
                slowest, total = quick_bound(self.model, stages)
                generator_ms = min(stage.generator_ms for stage in stages.values())
                bound = sum(iteration_terms(microbatches, slowest, total, 0.0, generator_ms))
                self.push(bound, 0, self.start, (samples, microbatches, stages, slowest, bound))
        seen, bound = finished, np.inf
        while self.queue:
            bound, _, _, work, arguments = heapq.heappop(self.queue)
            if bound >= self.limit:
                break
            if self.clock.over:
                finished = False
                break
            work(*arguments)
            bound = np.inf
        return self.result(finished, bound if seen else 0.0)

    def push(self, bound: float, layers_left: int, work, arguments: tuple) -> None:
        """Queues a call; of calls with equal bounds, the one with the fewest remaining layers comes first."""
        if bound < self.limit:
            heapq.heappush(self.queue, (bound, layers_left, next(self.order), work, arguments))

    def start(self, samples: int, microbatches: int, stages: dict, slowest: float, bound: float) -> None:
        """Builds the tables of a microbatch size, and queues the box of its plans that may be below the limit."""
        tables = build_tables(self.model, self.space, samples, microbatches, stages)
        spare = self.limit - bound
        highest = slowest + spare / max(microbatches - 1, 1e-12)
        self.enter(tables, (slowest, highest), (0.0, spare))

    def enter(self, tables: Tables, slowest: tuple[float, float], finish: tuple[float, float]) -> None:
        """Queues a box, shrunk to times that stages take, after a greedy search for a plan in it (`dive`)."""
        space = self.space
        total, slowest, finish = least_totals(
            tables.stage_ms, tables.end_ms, slowest, finish, tables.groups, space.offsets, space.contains, space.real
        )
        if np.inf in (slowest[0], finish[0]):
            return  # no stage takes a time within the limits
        root = Label(Box(tables, slowest, finish, total), self.model.layers, len(space.real) - 1)
        self.dive(root)
        self.queue_box(root)

    def queue_box(self, root: Label) -> None:
        box, tables = root.box, root.box.tables
        total, generator_ms = box.total[root.begin, root.state], tables.generator_ms.min()
        bound = sum(iteration_terms(tables.microbatches, box.slowest[0], total, box.finish[0], generator_ms))
        self.push(bound, root.begin, self.divide, (root, bound))

    def divide(self, root: Label, bound: float) -> None:
        """Expands the label of a narrow box; otherwise removes the part above the limit, or halves the widest side."""
        box, steady = root.box, max(root.box.tables.microbatches - 1, 1e-12)
        spare = self.limit - bound
        sides = [(box.slowest, steady), (box.finish, 1.0)]
        highs = [min(high, low + spare / weight) for (low, high), weight in sides]
        widths = [weight * (high - low) for high, ((low, _), weight) in zip(highs, sides)]
        narrow = NARROW if spare < np.inf else 1.0  # with fewer than k plans, finding plans has priority
        if max(widths) <= narrow * bound:
            return self.expand(root)
        if any(high - low < SHRINK * (old - low) for high, ((low, old), _) in zip(highs, sides)):
            ranges = ((low, high) for high, ((low, _), _) in zip(highs, sides))
            return self.enter(box.tables, *ranges)
        name = "slowest" if widths[0] > widths[1] else "finish"
        low, high = getattr(box, name)
        middle = (low + high) / 2
        limits = {"slowest": box.slowest, "finish": box.finish, name: (low, middle)}
        self.enter(box.tables, **limits)
        self.queue_box(replace(root, box=replace(box, **{name: (middle, high)})))

    def children(self, label: Label) -> np.ndarray:
        """Lower bounds of plans in which a choice precedes the tail, by its first layer: (begin, C)."""
        box, tables = label.box, label.box.tables
        return child_costs(
            (tables.stage_ms, tables.end_ms, tables.flights, tables.offsets, tables.fits),
            (box.total, box.slowest, box.finish),
            (label.begin, label.state, label.slowest, label.total, label.finish),
            self.model.options.in_flight(tables.microbatches, len(label.stages) + 1),
            tables.microbatches,
            tables.generator_ms,
        )

    def child(self, label: Label, choice: int, begin: int) -> Label:
        """The tail with one more stage before it: `choice`, with layers from `begin`."""
        tables, end = label.box.tables, label.begin
        stage_ms = float(tables.stage_ms[begin, end, choice])
        return Label(
            label.box,
            begin,
            int(label.state - tables.offsets[choice]),
            max(label.slowest, stage_ms),
            label.total + stage_ms,
            max(label.finish, float(tables.end_ms[begin, end, choice])),
            ((choice, begin, end), *label.stages),
        )

    def dive(self, label: Label) -> None:
        """Greedily follows the least bound to a complete plan, and keeps that plan."""
        while label.begin > 0:
            bound = self.children(label)
            begin, choice = np.unravel_index(bound.argmin(), bound.shape)
            if bound[begin, choice] == np.inf:
                return
            label = self.child(label, int(choice), int(begin))
        tables, first = label.box.tables, label.stages[0][0]
        terms = (label.slowest, label.total, label.finish, tables.generator_ms[first])
        self.keep(sum(iteration_terms(tables.microbatches, *terms)), label)

    def keep(self, cost: float, label: Label) -> None:
        """Adds a complete plan to `found`; of plans with equal signatures only the cheapest is kept."""
        if cost < self.limit:
            name = (label.box.tables.samples, label.signature)
            others = [entry for entry in self.found if entry[1] != name]
            same = [entry for entry in self.found if entry[1] == name and entry[0] <= cost]
            entries = others + (same or [(cost, name, label)])
            self.found = sorted(entries, key=lambda entry: entry[0])[: self.model.options.top_k]

    def expand(self, parent: Label, choice: int = -1, begin: int = 0) -> None:
        """Queues the tails with one more stage that may be among the top k; keeps complete plans.

        `choice` and `begin` extend `parent` first, unless `choice` is negative.
        """
        label = parent if choice < 0 else self.child(parent, choice, begin)
        if self.dominated(label):
            return
        self.num_expanded += 1
        bound = self.children(label)
        for choice in np.argsort(bound[0], kind="stable"):
            if not bound[0, choice] < self.limit:
                break
            self.keep(float(bound[0, choice]), self.child(label, int(choice), 0))
        for row, choice in zip(*np.nonzero(bound[1:] < self.limit)):
            begin = int(row) + 1
            self.push(float(bound[begin, choice]), begin, self.expand, (label, int(choice), begin))

    def dominated(self, label: Label) -> bool:
        """Whether the top k does not need this tail; if it does, the tail is recorded.

        It does not if, with the same remaining layers and devices, one expanded tail with the same signature or tails
        with top_k other signatures are at least as good in every term.
        """
        peers = label.box.expanded.setdefault((label.begin, label.state), [])
        values, name = (label.slowest, label.total, label.finish, len(label.stages)), label.signature
        better = {peer for peer, other in peers if all(a <= b for a, b in zip(other, values))}
        if name in better or len(better) >= self.model.options.top_k:
            return True
        peers.append((name, values))
        return False

    def result(self, finished: bool, bound: float) -> OptimalResult:
        options = self.model.options
        if not self.found and not finished:
            raise ValueError(f"no plan found within {self.clock.budget:g} s; raise max_seconds or unit")
        if not self.found:
            raise ValueError(self.why_nothing_fits())
        certificate = Certificate(
            lower_bound_ms=float(min(self.found[0][0], bound)),
            proven=finished,
            expanded=self.num_expanded,
            seconds=self.clock.seconds,
            summary=self.clock.summary(self.num_expanded, "partial plans evaluated", finished),
            unit=self.space.unit,
            choices=len(self.space.choices),
            states=int(self.space.real.sum()),
        )
        plans = tuple(report_plan(self.model, label.box.tables, label.stages, cost) for cost, _, label in self.found)
        return OptimalResult(options, plans, certificate)

    def why_nothing_fits(self) -> str:
        """The reason: no stage can run one sample, a layer does not fit on any choice, or no division fits."""
        stages = usable_stages(self.model, self.space, 1)
        if not stages:
            return "no stage can be formed: no profiled tensor parallel degree divides the nodes; add tp=1"
        largest = float(np.diff(self.model.parameter_bytes).max())
        loads = ((stage.state_bytes * largest, float(stage.memory_bytes.min())) for stage in stages.values())
        need, have = min(loads, key=lambda pair: pair[0] / pair[1])
        if need > have:
            return (
                f"the largest layer needs {need / 1e9:.2f} GB per device and {have / 1e9:.2f} GB are usable; "
                "add memory, profile larger tp degrees, or set shard_optimizer=True"
            )
        return (
            "the model fits in memory with no division of the devices; add devices, set shard_optimizer=True, "
            "or lower activation_bytes by recomputation"
        )
