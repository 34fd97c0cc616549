"""Result of a Metis search: ranking, statistics, and the lines that the reference prints."""

import math
import operator
from dataclasses import dataclass

import numpy as np

from research.metis.options import MetisOptions

HEADER = (
    "rank, cost, node_sequence, device_groups, strategies(dp_deg, tp_deg), batches(number of batch), layer_partition"
)


@dataclass(frozen=True)
class MetisPlan:
    """One costed plan. `cost` is milliseconds per step of the first `num_stage` stages only."""

    cost: float
    node_sequence: tuple[str, ...]
    device_groups: tuple[int, ...]
    strategies: tuple[tuple[int, int], ...]  # (dp, tp) per stage
    batches: int  # microbatches
    layer_partition: tuple[int, ...]  # first layer of each stage, and the end
    num_stage: int
    partition_attempt: int


@dataclass
class MetisResult:
    """Ranking and statistics of a search, which `add` updates; `exhausted`: max_seconds or max_plans ended it early."""

    options: MetisOptions
    device_order: tuple[str, ...]
    reference_profile: str
    count: int = 0  # steps as the reference counts them
    inter_stage_plans: int = 0
    plans_costed: int = 0
    plans_dropped: int = 0  # a profile needed for the cost was absent
    sum_of_costs: float = 0.0  # ms
    costed_by_attempt: tuple[int, ...] = (0, 0, 0)
    with_num_stage_mismatch: int = 0
    with_missing_layers: int = 0
    with_empty_stage: int = 0
    num_complete: int = 0  # all layers placed, no empty stage, all stages costed
    ranking: tuple[MetisPlan, ...] = ()
    best_complete: MetisPlan | None = None
    exhausted: bool = False
    seconds: float = 0.0  # mean search time of a trial

    @property
    def best(self) -> MetisPlan:
        return self.ranking[0]

    def add(self, sequence, num_stage: int, groups: np.ndarray, batches, found, plans: int) -> None:
        """Adds the first `plans` rows of `found`; row i is a plan of walk `found.walk[i]` over (groups, batches)."""
        kept = np.flatnonzero(~np.isnan(found.cost[:plans]))
        cost, bounds = found.cost[kept], found.bounds[kept, : groups.shape[1] + 1]
        lost, empty = bounds[:, -1] < self.options.num_layers, (np.diff(bounds) == 0).any(axis=1)
        mismatch = np.full(len(kept), num_stage != groups.shape[1])
        complete = ~(lost | empty | mismatch)
        self.plans_costed += len(kept)
        self.plans_dropped += plans - len(kept)
        self.sum_of_costs = math.fsum((self.sum_of_costs, *cost.tolist()))
        attempts = np.bincount(found.attempt[kept], minlength=4)[1:].tolist()
        self.costed_by_attempt = tuple(map(operator.add, self.costed_by_attempt, attempts))
        self.with_num_stage_mismatch += int(mismatch.sum())
        self.with_missing_layers += int(lost.sum())
        self.with_empty_stage += int(empty.sum())
        self.num_complete += int(complete.sum())

        def plan(index: int) -> MetisPlan:
            row = kept[index]
            group, batch = divmod(int(found.walk[row]), len(batches))
            sizes, dp = groups[group].tolist(), found.dp[row].tolist()
            return MetisPlan(
                float(cost[index]),
                tuple(sequence),
                tuple(sizes),
                tuple((replicas, size // replicas) for replicas, size in zip(dp, sizes)),
                int(batches[batch]),
                tuple(bounds[index].tolist()),
                num_stage,
                int(found.attempt[row]),
            )

        whole = np.flatnonzero(complete)
        if len(whole) and (self.best_complete is None or cost[whole].min() < self.best_complete.cost):
            self.best_complete = plan(int(whole[cost[whole].argmin()]))
        most = self.options.top_k
        limit = self.ranking[-1].cost if len(self.ranking) == most else np.inf
        better = [index for index in np.argsort(cost, kind="stable")[:most] if cost[index] < limit]
        # Plans of equal cost are ranked in the order in which they were found.
        self.ranking = tuple(sorted([*self.ranking, *map(plan, better)], key=lambda plan: plan.cost)[:most])


class SearchStopped(ValueError):
    """The search cannot continue; `partial` is the `MetisResult` so far."""

    def __init__(self, message: str, partial: MetisResult):
        super().__init__(message)
        self.partial = partial


def reference_lines(result: MetisResult) -> list[str]:
    """The lines that the reference prints: time, count, header, best plan."""
    best = result.best
    sequence = ", ".join(f"<DeviceType.{name}: '{name.lower()}'>" for name in best.node_sequence)
    sequence = f"({sequence},)" if len(best.node_sequence) == 1 else f"({sequence})"
    lists = list(best.device_groups), list(best.strategies), best.batches, list(best.layer_partition)
    return [
        f"Average time: {result.seconds * 1000} ms",
        f"count: {result.count}",
        HEADER,
        ", ".join(map(str, (1, best.cost, sequence, *lists))),
    ]
