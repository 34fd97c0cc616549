"""Agreement of the reproductions of DistIR and Metis with golden files, their speed, and Metis compared with the
optimal planner.

    python -m tests.research.agreement [--golden DIR]

takes less than a minute. DIR has other golden files of the same format.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import read_profiles
from mstrain.planner.mixed.bounds import iteration_terms
from mstrain.planner.mixed.cost import build_model, build_stage
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.search import plan_optimal
from mstrain.planner.mixed.space import Choice, kinds_of
from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.placement import Degrees, Placement
from mstrain.simulator.simulate import simulate
from research.distir import experiments
from research.distir.grid import simulate_mlp
from research.distir.mlp import Mlp
from research.distir.transform_mlp import mlp_step
from tests.research.distir.cases import figures, simulations
from tests.research.metis.cases import CaseFiles, search_figures
from tests.simulator.everything import expand
from tests.simulator.networks import Pairs


class Agreement:
    """Counts cases and figures; records the largest relative difference."""

    def __init__(self):
        self.cases, self.figures, self.worst, self.unequal = 0, 0, 0.0, 0

    def add(self, found: dict, expected: dict) -> None:
        self.cases += 1
        for key, wanted in expected.items():
            if key not in found:
                continue
            self.figures += 1
            if isinstance(wanted, float):
                self.worst = max(self.worst, abs(found[key] - wanted) / abs(wanted) if wanted else found[key])
            else:
                self.unequal += found[key] != wanted

    def say(self, name: str) -> None:
        print(
            f"{name}: {self.cases} cases, {self.figures} figures, largest relative difference "
            f"{self.worst:.1e}, {self.unequal} unequal counts"
        )


def distir(golden: dict) -> None:
    """Compares every case, with all devices simulated and with one of each kind."""
    agreement = Agreement()
    for case in golden.get("cases", ()):
        for result, batch in simulations(case):
            agreement.add(figures(result, batch, case["expected"]), case["expected"])
    agreement.say("DistIR")


def speed() -> None:
    """Prints CPU seconds and operations per second of the simulator on one core, after its compilation."""
    experiments.grid("notebook")
    started = time.process_time()
    rows, _ = experiments.grid("notebook")
    print(f"Simulator: {len(rows)} plans of the notebook's grid in {time.process_time() - started:.2f} s CPU")
    device, degrees = Device(1e14, 1.2e12), Degrees(4, 4, 4, 16)
    bandwidths = 25e9 * np.random.default_rng(0).uniform(0.5, 1.0, (64, 64))
    pairs = Cluster.homogeneous(64, device, Pairs((bandwidths + bandwidths.T) / 2))
    program = expand(mlp_step(Mlp.square(64, 1024, 4096), degrees), Placement(degrees))
    rate("64 devices, all links different", lambda: simulate(program, pairs))
    for name, degrees, mlp in (
        ("1,024 equal devices", Degrees(16, 16, 4, 16), Mlp.square(64, 8192, 8192, 2)),
        ("65,536 equal devices", Degrees(64, 16, 64, 128), Mlp.square(128, 16384, 64 * 128 * 4, 2)),
    ):
        cluster = Cluster.homogeneous(degrees.world, device, Switch(25e9, 1e-6))
        rate(name, lambda mlp=mlp, degrees=degrees, cluster=cluster: simulate_mlp(mlp, degrees, cluster))


def rate(name: str, work) -> None:
    started = time.process_time()
    operations = work().program.num_ops
    seconds = time.process_time() - started
    million = operations / seconds / 1e6
    print(f"  {name}: {operations:,} operations in {seconds:.3f} s CPU, {million:.1f} million/s")


def metis(golden: dict, root: Path, folder: Path) -> None:
    """Compares every run of the golden file, then prints its best plans and the optimal ones."""
    agreement, table, slowest = Agreement(), [], (0.0, "")
    cases = CaseFiles(root, golden, folder)
    for config in golden.get("configs", ()):
        given, best = config["inputs"], []
        files = cases.write(given)
        for run in config["runs"]:
            started = time.process_time()
            found = search_figures(files, given, run, run["profile_reference_file"])
            slowest = max(slowest, (time.process_time() - started, f"{config['id']} {run['mode']}"))
            agreement.add(flat(found), flat(run))
            best.append(found["best"])
        table.append((config["id"], files, given, min(best, key=lambda plan: plan["cost"])))
    agreement.say("Metis")
    print(f"  the slowest run, {slowest[1]}: {slowest[0]:.2f} s CPU")
    for row in table:
        compare(*row)


def flat(figures_of: dict) -> dict:
    """The figures, with those of the best plans under names of their own."""
    plans = {name: value for name, value in figures_of.items() if name in ("best", "best_complete") and value}
    inner = {f"{name} {key}": value for name, plan in plans.items() for key, value in plan.items()}
    return {name: value for name, value in figures_of.items() if name not in plans} | inner


def compare(name: str, files, given: dict, best) -> None:
    """Prints the best plan of Metis, over both device orders, and the optimal one, both with the correct cost."""
    options = PlanOptions(num_layers=given["num_layers"], batch=given["gbs"])
    started = time.process_time()
    result = plan_optimal(*files, options)
    seconds, plan = time.process_time() - started, result.best
    groups = " + ".join(
        f"{count} (dp {dp}, tp {tp})" for count, (dp, tp) in zip(best["device_groups"], best["strategies_dp_tp"])
    )
    begin, end = best["layer_partition"][0], best["layer_partition"][best["num_stages_costed"]]
    print(f"{name}: Metis {best['cost']:.1f} ms: {groups}, {best['batches']} microbatches; its cost counts ", end="")
    print(
        f"{best['num_stages_costed']} of {len(best['device_groups'])} stages, "
        f"layers {begin}-{end - 1} of {options.num_layers}"
    )
    print(f"      correct cost of that plan: {correct_cost(files, options, best)}")
    stages = " | ".join(
        f"{stage.first_layer}-{stage.end_layer - 1} on "
        + " ".join(f"{kind} {count}" for kind, count in stage.devices.items())
        + f" tp {stage.tp}"
        for stage in plan.stages
    )
    print(f"      optimal {plan.cost_ms:.1f} ms, gap {100 * result.gap:.1f} %, {seconds:.2f} s CPU: ", end="")
    print(f"{plan.microbatches} microbatches of {plan.microbatch}; {stages}")


def correct_cost(files, options: PlanOptions, best) -> str:
    """The cost of a plan of Metis with all stages by the cost model of the optimal planner, or why there is none."""
    cluster = read_hosts(*files[:2])
    kinds = kinds_of(cluster)
    model = build_model(options, kinds, read_profiles(files[2], cluster.device_types))
    left = {kind: kinds[kind].devices for kind in range(len(kinds))}
    order = sorted(left, key=lambda kind: best["node_sequence"].index(kinds[kind].name))
    samples = -(-options.batch // best["batches"])
    times, ends, generator_ms = [], [], 0.0
    for number, (count, (_, tp)) in enumerate(zip(best["device_groups"], best["strategies_dp_tp"])):
        begin, end = best["layer_partition"][number : number + 2]
        devices = [0] * len(kinds)
        for kind in order:
            devices[kind] = min(count - sum(devices), left[kind])
            left[kind] -= devices[kind]
        spans = tp == count and sum(map(bool, devices)) > 1
        choice = Choice(tuple(devices), tp, tuple(0 if spans else part // tp for part in devices), spans=spans)
        stage = build_stage(model, choice, samples)
        if stage is None:
            return f"none: no profile for stage {number}'s share of {samples} samples"
        if begin == end:
            return f"none: stage {number} has no layers"
        if stage.fitting(*model.held(begin, end)) < 1:
            return f"none: stage {number} does not fit in memory"
        generator_ms = generator_ms if number else stage.generator_ms
        found = stage.times(model, begin, end)
        times.append(float(found.stage))
        ends.append(float(found.end))
    cost = sum(iteration_terms(best["batches"], max(times), sum(times), max(ends), generator_ms))
    return f"{cost:.1f} ms"


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, default=Path(__file__).parents[1] / "golden")
    folder = parser.parse_args().golden
    distir(read(folder / "distir.json"))
    speed()
    with tempfile.TemporaryDirectory() as scratch:
        metis(read(folder / "metis.json"), Path(scratch), folder)


if __name__ == "__main__":
    main()
