"""Result of a Metis search: ranking, statistics, the reference's printed lines and JSON."""

import heapq
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from research.metis.options import MetisOptions

HEADER = (
    "rank, cost, node_sequence, device_groups, strategies(dp_deg, tp_deg), batches(number of batch), layer_partition"
)


@dataclass(frozen=True)
class MetisPlan:
    """One costed plan. Cost in milliseconds per iteration, of its first `num_stage` stages only."""

    cost: float
    node_sequence: tuple[str, ...]
    device_groups: tuple[int, ...]
    strategies: tuple[tuple[int, int], ...]  # (dp, tp) per stage
    batches: int  # microbatches
    layer_partition: tuple[int, ...]  # first layer of each stage, and the end
    num_stage: int
    partition_attempt: int


@dataclass(frozen=True)
class MetisResult:
    """What the search found and how much it did; `exhausted` says that a budget ended it early."""

    options: MetisOptions
    device_order: tuple[str, ...]
    reference_profile: str
    count: int  # steps as the reference counts them
    inter_stage_plans: int
    plans_costed: int
    plans_dropped: int  # a profile needed for the cost was absent
    sum_of_costs: float  # ms
    costed_by_attempt: tuple[int, int, int]
    with_num_stage_mismatch: int
    with_missing_layers: int
    with_empty_stage: int
    num_complete: int  # all layers placed, no empty stage, all stages costed
    ranking: tuple[MetisPlan, ...]
    best_complete: MetisPlan | None
    exhausted: bool
    seconds: float = 0.0  # mean search time of a trial

    @property
    def best(self) -> MetisPlan:
        return self.ranking[0]


class SearchStopped(ValueError):
    """The search cannot continue; `partial` is the MetisResult up to here."""

    def __init__(self, message: str, partial: MetisResult):
        super().__init__(message)
        self.partial = partial


class Tally:
    """Collects the plans of the walks; keeps all costs but only the best plans."""

    def __init__(self, options: MetisOptions, order: tuple[str, ...], reference_profile: str):
        self.options, self.order, self.reference_profile = options, order, reference_profile
        self.count = self.inter_stage_plans = self.plans_costed = self.plans_dropped = 0
        self.mismatched = self.incomplete = self.with_empty = self.complete = 0
        self.attempts = [0, 0, 0]
        self.costs: list[float] = []
        self.kept: list[tuple] = []  # heap of (-cost, -number, plan): the worst of the best on top
        self.best_complete: MetisPlan | None = None
        self.exhausted = False

    def add(self, sequence, num_stage: int, groups, batches: int, found, plans: int, steps: int) -> None:
        """Take over the first `plans` rows of `found`."""
        self.inter_stage_plans += 1
        self.count += steps
        mismatch = num_stage != len(groups)
        for i in range(plans):
            cost, bounds = float(found.cost[i]), found.bounds[i]
            if math.isnan(cost):
                self.plans_dropped += 1
                continue
            self.plans_costed += 1
            self.costs.append(cost)
            self.attempts[found.attempt[i] - 1] += 1
            lost, empty = bounds[-1] < self.options.num_layers, bool((bounds[1:] == bounds[:-1]).any())
            self.mismatched += mismatch
            self.incomplete += bool(lost)
            self.with_empty += empty
            complete = not (mismatch or lost or empty)
            self.complete += complete
            better = complete and (self.best_complete is None or cost < self.best_complete.cost)
            kept = len(self.kept) < self.options.top_k or cost < -self.kept[0][0]
            if not (better or kept):
                continue
            plan = MetisPlan(
                cost,
                tuple(sequence),
                tuple(groups),
                tuple((int(dp), size // int(dp)) for dp, size in zip(found.dp[i], groups)),
                batches,
                tuple(int(bound) for bound in bounds),
                num_stage,
                int(found.attempt[i]),
            )
            if better:
                self.best_complete = plan
            if kept:
                heapq.heappush(self.kept, (-cost, -self.plans_costed, plan))
                if len(self.kept) > self.options.top_k:
                    heapq.heappop(self.kept)

    def result(self) -> MetisResult:
        first, second, third = self.attempts
        ranking = tuple(plan for _, _, plan in sorted(self.kept, key=lambda entry: (-entry[0], -entry[1])))
        return MetisResult(
            options=self.options,
            device_order=self.order,
            reference_profile=self.reference_profile,
            count=self.count,
            inter_stage_plans=self.inter_stage_plans,
            plans_costed=self.plans_costed,
            plans_dropped=self.plans_dropped,
            sum_of_costs=math.fsum(self.costs),
            costed_by_attempt=(first, second, third),
            with_num_stage_mismatch=self.mismatched,
            with_missing_layers=self.incomplete,
            with_empty_stage=self.with_empty,
            num_complete=self.complete,
            ranking=ranking,
            best_complete=self.best_complete,
            exhausted=self.exhausted,
        )


def reference_lines(result: MetisResult) -> list[str]:
    """The lines the reference prints: time, count, header, best plan."""
    best = result.best
    sequence = ", ".join(f"<DeviceType.{name}: '{name.lower()}'>" for name in best.node_sequence)
    sequence = f"({sequence},)" if len(best.node_sequence) == 1 else f"({sequence})"
    values = [
        1,
        best.cost,
        sequence,
        list(best.device_groups),
        list(best.strategies),
        best.batches,
        list(best.layer_partition),
    ]
    return [
        f"Average time: {result.seconds * 1000} ms",
        f"count: {result.count}",
        HEADER,
        ", ".join(str(value) for value in values),
    ]


def write_json(result: MetisResult, path: str | Path) -> None:
    """The whole result, ranking included."""
    Path(path).write_text(json.dumps(asdict(result), indent=1) + "\n")
