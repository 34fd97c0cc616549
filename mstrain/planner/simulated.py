"""The winner, simulated: one rank of every stage, with its links, its memory and a trace."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from mstrain.planner.cost import Costed, cost_plan
from mstrain.planner.question import Question
from mstrain.planner.step import transformer_step
from mstrain.simulator.cluster import Axes, Cluster
from mstrain.simulator.plots import write_pictures
from mstrain.simulator.simulate import Simulation, simulate_step
from mstrain.timeline import exposed_communication


@dataclass(frozen=True)
class Simulated:
    """A simulated step with `microbatches` of the plan's size; `predicted` is what the cost model says of
    the same.
    """

    result: Simulation
    microbatches: int
    predicted: Costed
    exposed: float  # mean part of the step in which a device waits for a link and computes nothing


def plan_cluster(question: Question, costed: Costed) -> Cluster:
    """The devices, at the rate of their GEMMs, and one link per axis of the plan."""
    plan, pod = costed.plan, question.pod
    sizes = (plan.pipeline, plan.data, plan.rows, plan.cols)
    constants = pod.constants(sizes, question.dtype)
    links = (constants.row, constants.row, constants.row, constants.col)
    return Cluster.homogeneous(
        pod.devices, pod.device(constants), Axes(("pipeline", "data", "row", "col"), sizes, links)
    )


def simulate_plan(question: Question, costed: Costed, microbatches: int = 8) -> Simulated:
    """Simulates the plan; long steps with so many `microbatches`, at least two per stage, instead of all."""
    plan = costed.plan
    count = min(plan.microbatches, max(microbatches, 2 * plan.pipeline))
    if question.fixed.chunks(plan.pipeline) > 1:
        count -= count % plan.pipeline
    step = transformer_step(question, costed, count)
    result = simulate_step(step, plan_cluster(question, costed))
    same = cost_plan(question, dataclasses.replace(plan, microbatches=count), costed.products)
    waits = exposed_communication(result.timeline())
    return Simulated(result, count, same, sum(waits.values()) / len(waits) / result.seconds)


def write_simulation(simulated: Simulated, folder: Path) -> list[str]:
    """Trace, pictures and simulation.json; returns their names."""
    return [*write_pictures(simulated.result, folder), write_numbers(simulated, folder)]


def write_numbers(simulated: Simulated, folder: Path) -> str:
    """simulation.json: seconds, waiting, and peak bytes of the fullest device of each category."""
    result = simulated.result
    peaks = {name: max(use.peak_bytes.values()) for name, use in result.memory_by_category.items()}
    document = {
        "microbatches": simulated.microbatches,
        "step_seconds": result.seconds,
        "predicted_seconds": simulated.predicted.seconds,
        "exposed_fraction": simulated.exposed,
        "operations": result.program.num_ops,
        "peak_bytes": result.peak_bytes,
        "predicted_bytes": simulated.predicted.fullest.memory.total,
        "peak_bytes_by_category": peaks,
    }
    (folder / "simulation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return "simulation.json"


def summary(simulated: Simulated, microbatches: int) -> list[str]:
    """Simulated against predicted time and memory, of a plan with so many microbatches."""
    result, count, predicted = simulated.result, simulated.microbatches, simulated.predicted
    part = "" if count == microbatches else f", {count} of the {microbatches} microbatches"
    peak = max(result.memory.peak_bytes.values())
    return [
        f"Simulated{part}: {1e3 * result.seconds:.1f} ms, cost model {1e3 * predicted.seconds:.1f} ms "
        f"({100 * (result.seconds / predicted.seconds - 1):+.1f} %); {result.program.num_ops:,} operations "
        f"of the whole job; devices wait for links {100 * simulated.exposed:.1f} % of the step",
        f"Simulated memory: {peak / 1e9:.1f} GB on the fullest device, cost model "
        f"{predicted.fullest.memory.total / 1e9:.1f} GB",
    ]
