"""The exhaustive search over data, tensor and pipeline degrees of a perceptron; every simulated plan is a table row."""

from collections.abc import Iterator
from math import log2

from mstrain.planner.clock import divisors
from mstrain.simulator.cluster import Cluster
from mstrain.simulator.placement import Degrees
from mstrain.simulator.simulate import Simulation, simulate_step
from mstrain.timeline import device_use
from research.distir.mlp import Mlp
from research.distir.rules import RuleSet, rule_set
from research.distir.schedules import bubble_fraction, schedule
from research.distir.transform_mlp import mlp_step, schedule_name


def simulate_mlp(mlp: Mlp, degrees: Degrees, cluster: Cluster, rules: str | RuleSet = "corrected") -> Simulation:
    """Simulates a training step of `mlp`. Raises ValueError, with the fix, if `degrees` do not divide the model."""
    rules = rule_set(rules)
    return simulate_step(mlp_step(mlp, degrees, rules), cluster, rules)


def degrees_grid(world: int, batch: int) -> Iterator[Degrees]:
    """All (data, tensor, pipeline) with product `world`, in lexicographic order, with all numbers of microbatches.

    As in DistIR, these are 1 without a pipeline, otherwise the powers of two from 2 to sqrt(batch / data) / 2.
    """
    for data in divisors(world):
        for tensor in divisors(world // data):
            pipeline = world // data // tensor
            powers = range(1, int(log2(batch / data) / 2)) if pipeline > 1 else range(1)
            yield from (Degrees(data, tensor, pipeline, 1 << power) for power in powers)


def grid_search(
    mlp: Mlp, world: int, cluster: Cluster, rules: str | RuleSet = "corrected"
) -> tuple[list[dict], list[tuple[Degrees, str]]]:
    """The rows of all plans of `degrees_grid` that can run, and (plan, reason) of those that cannot."""
    rows, rejected = [], []
    for degrees in degrees_grid(world, mlp.batch):
        try:
            rows.append(plan_row(mlp, degrees, cluster, rule_set(rules)))
        except ValueError as error:
            rejected.append((degrees, str(error)))
    return rows, rejected


def plan_row(mlp: Mlp, degrees: Degrees, cluster: Cluster, rules: RuleSet) -> dict:
    """The table row of one simulated plan. Raises ValueError if it cannot run or a device has too little memory.

    The columns up to `peak_memory` are those of DistIR's grid search, in seconds, samples/s and bytes. Then follow
    means over devices:

      communication_fraction: time of communication / (time of communication + time of compute).
      exposed_fraction: part of the step in which a device waits for communication and does not compute.
      idle_fraction: part of the step in which a device does not compute.
      bubble_fraction: idle part of the pipeline schedule if all passes take the same time.
    """
    result = simulate_mlp(mlp, degrees, cluster, rules)
    for device, peak in result.memory.peak_bytes.items():
        if peak > (limit := cluster.devices[device].memory_bytes):
            raise ValueError(
                f"needs {peak / 1e9:.1f} GB on device {device}, which has {limit / 1e9:.1f} GB; "
                "raise a degree or lower the batch"
            )
    name = schedule_name(degrees, rules)
    steps = schedule(name, degrees.pipeline, degrees.microbatches, degrees.pipeline * degrees.interleave)
    compute, links, exposed = map(sum, zip(*device_use(result.timeline()).values()))
    whole = len(result.program.devices) * result.seconds
    return {
        "model_size": f"{mlp.layers}x{mlp.hidden_dim}", "world_size": degrees.world, "batch_size": mlp.batch,
        "dp_degree": degrees.data, "hp_degree": degrees.tensor, "pp_degree": degrees.pipeline,
        "num_microbatches": degrees.microbatches, "latency": result.seconds,
        "throughput": mlp.batch / result.seconds, "peak_memory": result.peak_bytes,
        "communication_fraction": links / (compute + links), "exposed_fraction": exposed / whole,
        "idle_fraction": 1.0 - compute / whole, "bubble_fraction": bubble_fraction(steps, degrees.pipeline),
        "schedule": name, "rules": rules.name,
    }  # fmt: skip
