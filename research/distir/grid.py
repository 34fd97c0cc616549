"""Grid search over data, tensor and pipeline degrees of a perceptron, and the table it gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from mstrain.json_files import write_json
from mstrain.planner.clock import divisors
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
    """One simulated plan; the columns up to peak_memory are those of DistIR's grid search (seconds, samples/s, bytes).

    `exposed_fraction` is the mean part of the step in which a device waits for a link and computes nothing;
    `communication_fraction` counts hidden communication too; `idle_fraction` is the part in which a device computes
    nothing; `bubble_fraction` is the idle part of the pipeline schedule if all tasks take equally long.
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


def degrees_grid(world: int, batch: int) -> Iterator[Degrees]:
    """Every (data, tensor, pipeline) with product `world`, in that order, for all microbatch counts.

    Those are DistIR's: 1 without a pipeline, else powers of two up to sqrt(batch / data) / 4.
    """
    for data in divisors(world):
        for tensor in divisors(world // data):
            pipeline = world // data // tensor
            powers = range(1, int(log2(batch / data) / 2)) if pipeline > 1 else range(1)
            yield from (Degrees(data, tensor, pipeline, 1 << power) for power in powers)


def grid_search(
    mlp: Mlp,
    world: int,
    cluster: Cluster,
    rules: str | RuleSet = "corrected",
    options: StepOptions = StepOptions(),
) -> tuple[list[Row], list[Rejected]]:
    """Simulate every plan of `degrees_grid` on `world` devices: the plans that run, in grid order, and the others.

    A plan that needs more memory than its device has is rejected too.
    """
    rows, rejected = [], []
    for degrees in degrees_grid(world, mlp.batch):
        try:
            result = simulate_mlp(mlp, degrees, cluster, rules, options)
            _check_memory(result, cluster)
            rows.append(make_row(mlp, degrees, result, options))
        except ValueError as error:
            rejected.append(Rejected(degrees, str(error)))
    return rows, rejected


def _check_memory(result: Simulation, cluster: Cluster) -> None:
    for device, peak in result.memory.peak_bytes.items():
        limit = cluster.devices[device].memory_bytes
        if peak > limit:
            raise ValueError(
                f"needs {peak / 1e9:.1f} GB on device {device}, which has {limit / 1e9:.1f} GB; "
                "raise a degree or lower the batch"
            )


def make_row(mlp: Mlp, degrees: Degrees, result: Simulation, options: StepOptions = StepOptions()) -> Row:
    """The table row of one simulated plan."""
    exposed = exposed_communication(result.timeline())
    assert isinstance(result.rules, RuleSet)
    name = schedule_name(degrees, result.rules, options)
    steps = schedule(name, degrees.pipeline, degrees.microbatches, degrees.pipeline * degrees.interleave)
    return Row(
        model_size=f"{mlp.layers}x{mlp.hidden_dim}",
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
    """Write rows with equal keys as `path`.csv and `path`.json. Raises ValueError without rows."""
    if not table:
        raise ValueError("no plan fits, so no table is written. See the rejected plans for the reasons.")
    write_csv(table, f"{path}.csv")
    write_json(table, f"{path}.json")
