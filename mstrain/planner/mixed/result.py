"""Plans of the optimal planner with all terms of their time, and the files in which they are saved."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mstrain.display.tables import write_csv
from mstrain.json_files import write_json
from mstrain.planner.mixed.bounds import iteration_terms
from mstrain.planner.mixed.cost import Model, Stage
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.space import kind_labels
from mstrain.planner.mixed.tables import Tables


@dataclass(frozen=True)
class StagePlan:
    """One stage; times in ms per microbatch (exchange and update: per iteration), GB of the device that needs most.

    Device types of unequal nodes have a number appended.
    """

    devices: dict[str, int]  # per device type
    first_layer: int
    end_layer: int  # exclusive
    tp: int
    replicas: dict[str, int]  # per type; one replica spanning types is listed under all of them
    samples: dict[str, int]  # per replica of the type and microbatch
    slowest_type: str
    type_ms: dict[str, float]  # per type: layers and, on the last stage, the profiled time that belongs to no layer
    type_tensor_ms: dict[str, float]  # per type: tensor-parallel collectives that are not in the profiles
    compute_ms: float  # of the slowest type, as `tensor_ms` and `sync_ms`
    tensor_ms: float
    sync_ms: float
    boundary_ms: float
    stage_ms: float
    exchange_ms: float
    update_ms: float
    state_gb: float
    activation_gb: float
    usable_gb: float
    microbatches_in_flight: int
    parameter_bytes: float  # of its layers
    sample_bytes: float  # activations that a device saves per sample

    @property
    def layers(self) -> str:
        """First and last, both inclusive: `3-7`."""
        return f"{self.first_layer}-{self.end_layer - 1}"


@dataclass(frozen=True)
class Plan:
    """A complete plan; its cost is the sum of the `iteration_terms`, in ms per iteration."""

    cost_ms: float
    microbatch: int  # samples
    microbatches: int
    stages: tuple[StagePlan, ...]
    steady_ms: float  # (microbatches - 1) * slowest stage
    fill_ms: float  # sum of the stages
    end_ms: float  # largest exchange + update
    generator_ms: float
    bubble: float  # fraction of the pipeline's device time in which stages wait
    idle_devices: int


@dataclass(frozen=True)
class Certificate:
    """The proof that the first plan is optimal: no plan of the space costs less than the lower bound."""

    lower_bound_ms: float
    proven: bool  # False if the time budget ended the search
    expanded: int  # number of partial plans evaluated
    seconds: float  # duration of the search
    summary: str  # a sentence that reports the number of plans and the duration
    unit: int  # the number of devices of every stage is a multiple of it
    choices: int  # number of combinations of device counts and tensor-parallel degree of a stage
    states: int  # number of combinations of remaining devices


@dataclass(frozen=True)
class OptimalResult:
    """Distinct plans, cheapest first."""

    options: PlanOptions
    plans: tuple[Plan, ...]
    certificate: Certificate

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def gap(self) -> float:
        """Upper bound of how much cheaper an unseen plan can be, as a fraction of the best plan's cost."""
        return 1 - self.certificate.lower_bound_ms / self.best.cost_ms


def report_stage(model: Model, stage: Stage, begin: int, end: int, flight: int) -> StagePlan:
    """The report of a stage with layers [begin, end) and `flight` microbatches in flight."""
    choice, labels = stage.choice, kind_labels(model.kinds)

    def by_kind(values) -> dict:
        return dict(zip((labels[kind] for kind in choice.kinds), values))

    times = stage.times(model, begin, end)
    slowest = int(np.argmax(times.by_kind))
    parameters, kept = map(float, model.held(begin, end))
    kept /= choice.tp
    activation = [share * kept * flight for share in stage.shares]
    fullest = int(np.argmin(stage.memory_bytes - activation))
    return StagePlan(
        by_kind(choice.devices[kind] for kind in choice.kinds), begin, end, choice.tp,
        replicas=by_kind(1 if choice.spans else choice.replicas[kind] for kind in choice.kinds),
        samples=by_kind(stage.shares), slowest_type=labels[choice.kinds[slowest]],
        type_ms=by_kind((times.compute + times.sync).tolist()), type_tensor_ms=by_kind(times.tensor.tolist()),
        compute_ms=float(times.compute[slowest]), tensor_ms=float(times.tensor[slowest]),
        sync_ms=float(times.sync[slowest]), boundary_ms=float(times.boundary), stage_ms=float(times.stage),
        exchange_ms=float(times.exchange), update_ms=float(times.update), state_gb=stage.state_bytes * parameters / 1e9,
        activation_gb=activation[fullest] / 1e9, usable_gb=float(stage.memory_bytes[fullest] / 1e9),
        microbatches_in_flight=flight, parameter_bytes=parameters, sample_bytes=kept,
    )  # fmt: skip


def report_plan(model: Model, tables: Tables, stages: Sequence[tuple[int, int, int]], expected_ms: float) -> Plan:
    """The plan of `stages` (choice, begin, end) with all terms; asserts that its cost is `expected_ms`."""
    count = tables.microbatches
    reports = tuple(
        report_stage(model, tables.stages[choice], begin, end, model.options.in_flight(count, len(stages) - number))
        for number, (choice, begin, end) in enumerate(stages)
    )
    times = [report.stage_ms for report in reports]
    end_ms = max(report.exchange_ms + report.update_ms for report in reports)
    terms = iteration_terms(count, max(times), sum(times), end_ms, tables.stages[stages[0][0]].generator_ms)
    cost, (steady, fill, *_) = sum(terms), terms
    assert math.isclose(cost, expected_ms, rel_tol=1e-9), (cost, expected_ms)
    assert all(report.state_gb + report.activation_gb <= report.usable_gb * (1 + 1e-9) for report in reports)
    idle = sum(kind.devices for kind in model.kinds) - sum(sum(report.devices.values()) for report in reports)
    bubble = 1 - count * fill / (len(times) * (steady + fill))
    return Plan(cost, tables.samples, count, reports, *terms, bubble, idle)


def write_result(result: OptimalResult, path: str | Path) -> None:
    """Writes a JSON file with options, plans with all terms, certificate and gap."""
    write_json({**asdict(result), "gap": result.gap}, path)


def write_stages(result: OptimalResult, path: str | Path) -> None:
    """Writes a CSV file with one line per stage of every plan."""
    rows = []
    for rank, plan in enumerate(result.plans, 1):
        own = {name: getattr(plan, name) for name in ("cost_ms", "microbatch", "microbatches")}
        for number, stage in enumerate(map(asdict, plan.stages)):
            texts = {name: named_counts(value, "=") for name, value in stage.items() if isinstance(value, dict)}
            rows.append({"rank": rank, **own, "stage": number, **stage, **texts})
    write_csv(rows, path)


def named_counts(counts: dict, between: str = " ") -> str:
    """The entries of `counts` as text, such as `A100 8 V100 4`."""
    return " ".join(f"{name}{between}{count}" for name, count in counts.items())
