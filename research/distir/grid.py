"""Grid search over data, tensor and pipeline degrees of a perceptron, and the table it gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from mstrain.planner.tables import write_csv
from mstrain.simulator.cluster import Cluster
from mstrain.simulator.placement import Degrees
from mstrain.simulator.simulate import Simulation, simulate_step
from mstrain.timeline import exposed_communication
from research.distir.mlp import Mlp, StepOptions
from research.distir.rules import RuleSet, rule_set
from research.distir.schedules import bubble_fraction, schedule
from research.distir.transform_mlp import mlp_step, schedule_name


@dataclass(frozen=True)
class Row:
    """One simulated plan; the columns up to peak_memory are those of DistIR's grid search (seconds,
    samples/s, bytes).

    `exposed_fraction` is the part of the step in which a device waits for a link and computes nothing, on
    average; `communication_fraction` counts hidden communication too; `idle_fraction` is the part of the step
    in which a device computes nothing; `bubble_fraction` is what the pipeline schedule alone leaves idle,
    were all tasks equally long.
    """

    model_size: str
    world_size: int
    batch_size: int
    dp_degree: int
    hp_degree: int
    pp_degree: int
    num_microbatches: int
    latency: float
    throughput: float
    peak_memory: int
    communication_fraction: float
    exposed_fraction: float
    idle_fraction: float
    bubble_fraction: float
    schedule: str
    rules: str


@dataclass(frozen=True)
class Rejected:
    """A plan that cannot be run, and why."""

    degrees: Degrees
    reason: str


def simulate_mlp(
    mlp: Mlp,
    degrees: Degrees,
    cluster: Cluster,
    rules: str | RuleSet = "corrected",
    options: StepOptions = StepOptions(),
    everything: bool = False,
) -> Simulation:
    """Simulate a training step of `mlp`. Raises ValueError, with the fix, for a plan that does not fit."""
    rules = rule_set(rules)
    return simulate_step(mlp_step(mlp, degrees, rules, options), cluster, rules, everything)


def notebook_microbatches(batch: int, data: int, pipeline: int) -> list[int]:
    """DistIR's choice: 1 without a pipeline, else powers of two up to sqrt(batch / data) / 4."""
    return [1] if pipeline == 1 else [2**e for e in range(1, int(log2(batch / data) / 2))]


def degrees_grid(
    world: int, batch: int, microbatches: Callable[[int, int, int], Sequence[int]] = notebook_microbatches
) -> Iterator[Degrees]:
    """Every (data, tensor, pipeline) with product `world`, in that order, for all microbatch counts."""
    for data in (d for d in range(1, world + 1) if world % d == 0):
        for tensor in (h for h in range(1, world // data + 1) if world // data % h == 0):
            pipeline = world // data // tensor
            for count in microbatches(batch, data, pipeline):
                yield Degrees(data, tensor, pipeline, count)


def grid_search(
    mlp: Mlp,
    world: int,
    cluster: Cluster,
    rules: str | RuleSet = "corrected",
    options: StepOptions = StepOptions(),
    model_size: str = "mlp",
) -> tuple[list[Row], list[Rejected]]:
    """Simulate every plan of `degrees_grid` on `world` devices: the plans that run, in grid order, and the
    others.

    A plan that needs more memory than its device has is rejected too.
    """
    rules = rule_set(rules)
    rows, rejected = [], []
    for degrees in degrees_grid(world, mlp.batch):
        try:
            result = simulate_mlp(mlp, degrees, cluster, rules, options)
        except ValueError as error:
            rejected.append(Rejected(degrees, str(error)))
            continue
        problem = _too_big(result, cluster)
        if problem:
            rejected.append(Rejected(degrees, problem))
        else:
            rows.append(make_row(mlp, degrees, result, options, model_size))
    return rows, rejected


def _too_big(result: Simulation, cluster: Cluster) -> str:
    """Why the plan does not fit the memory of some device, or nothing."""
    for device, peak in result.memory.peak_bytes.items():
        limit = cluster.devices[device].memory_bytes
        if peak > limit:
            return (
                f"needs {peak / 1e9:.1f} GB on device {device}, which has {limit / 1e9:.1f} GB; "
                "raise a degree or lower the batch"
            )
    return ""


def make_row(
    mlp: Mlp, degrees: Degrees, result: Simulation, options: StepOptions = StepOptions(), model_size: str = "mlp"
) -> Row:
    """The table row of one simulated plan."""
    exposed = exposed_communication(result.timeline())
    assert isinstance(result.rules, RuleSet)
    name = schedule_name(degrees, result.rules, options)
    steps = schedule(name, degrees.pipeline, degrees.microbatches, degrees.pipeline * degrees.interleave)
    return Row(
        model_size=model_size,
        world_size=degrees.world,
        batch_size=mlp.batch,
        dp_degree=degrees.data,
        hp_degree=degrees.tensor,
        pp_degree=degrees.pipeline,
        num_microbatches=degrees.microbatches,
        latency=result.seconds,
        throughput=mlp.batch / result.seconds,
        peak_memory=result.peak_bytes,
        communication_fraction=result.communication_fraction,
        exposed_fraction=sum(exposed.values()) / (len(exposed) * result.seconds),
        idle_fraction=result.idle_fraction,
        bubble_fraction=bubble_fraction(steps, degrees.pipeline),
        schedule=name,
        rules=result.rules.name,
    )


def write_table(table: Sequence[Mapping], path: str | Path) -> None:
    """Write rows with equal keys as `path`.csv and `path`.json. Raises ValueError when there are none."""
    if not table:
        raise ValueError("there are no rows to write: no plan fits; see the rejected plans for the reasons")
    write_csv(table, f"{path}.csv")
    Path(f"{path}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
