"""The experiments of DistIR's notebook, `euromlsys21_mlp_grid_search_results.ipynb`, with any rule set.

`python plan.py experiment=distir_mlp rules=notebook` reproduces them. `rules=corrected` (the default) runs them without
the defects of DistIR; the best plan is then a different one.
"""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mstrain.display.gantt import plot_gantt
from mstrain.display.plots import plot_memory
from mstrain.display.tables import write_csv
from mstrain.json_files import write_json
from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.placement import Degrees
from mstrain.simulator.simulate import place, simulate
from mstrain.timeline import Timeline, write_perfetto
from research.distir.grid import grid_search, plan_row, simulate_mlp
from research.distir.mlp import Mlp
from research.distir.plots import plot_columns
from research.distir.rules import DISTIR_NAMES, RuleSet, rule_set
from research.distir.transform_mlp import mlp_step

MODEL = Mlp.square(64, 8192, 8192)
WORLD = 16
# By axis: the parameter of the model that has one line per value, its values, the degree on the x axis, its values,
# and the number of microbatches.
ISOLATED = {
    "data": ("batch", (512, 1024, 2048, 4096), "data", (2, 4, 8, 16, 32, 64, 128), 1),
    "horizontal": ("width", (1024, 2048, 4096, 8192), "tensor", (2, 4, 8, 16, 32, 64), 1),
    "pipeline": ("batch", (512, 1024, 2048, 4096), "pipeline", (2, 4, 8, 16, 32, 64), 8),
}


def notebook_cluster(num_workers: int, rules: RuleSet) -> Cluster:
    """Devices of the notebook: 1e14 FLOP/s, memory of 1.2e12 bytes/s, 200 Gbit/s; DistIR's rules add a root device."""
    device = Device(flops=1e14, memory_bandwidth=1.2e12)
    return Cluster.homogeneous(num_workers + rules.first, device, Switch(200 * GIGABIT))


def notebook_rules(name: str) -> RuleSet:
    """The rule set `name`; DistIR's rule sets without optimizer and without gathers, as in the notebook."""
    rules = rule_set(name)
    return replace(rules, optimizer="none", gather_outputs=False) if rules.original else rules


def one_plan(degrees: Degrees = Degrees(), rules: str = "corrected", mlp: Mlp = MODEL) -> dict:
    """The table row of one plan; by default, of one device with the whole batch."""
    chosen = notebook_rules(rules)
    return plan_row(mlp, degrees, notebook_cluster(degrees.world, chosen), chosen)


def grid(rules: str = "corrected") -> tuple[list[dict], list[tuple[Degrees, str]]]:
    """Rows of all plans for WORLD devices that can run, and (plan, reason) of those that cannot."""
    chosen = notebook_rules(rules)
    return grid_search(MODEL, WORLD, notebook_cluster(WORLD, chosen), chosen)


def isolated(axis: str, rules: str = "corrected") -> list[dict]:
    """Throughput by one parallel degree, the others being 1: rows with model parameter, degree and samples/s.

    `axis` is data, horizontal (tensor) or pipeline (8 microbatches).
    """
    series, values, name, degrees, microbatches = ISOLATED[axis]
    rows = []
    for value in values:
        mlp = Mlp.square(128, value, 8192) if axis == "horizontal" else Mlp.square(64, 8192, value)
        for degree in degrees:
            row = one_plan(Degrees(**{name: degree}, microbatches=microbatches), rules, mlp)
            rows.append({series: value, "degree": degree, "throughput": row["throughput"]})
    return rows


def simulator_scaling(rules: str = "corrected", trials: int = 5) -> list[dict]:
    """Milliseconds to simulate 32 to 4096 layers on one device (median of `trials`), by number of operations.

    As in the notebook, the time does not include building the program and compiling the simulator.
    """
    chosen, rows = notebook_rules(rules), []
    cluster = notebook_cluster(1, chosen)
    for layers in (32 << power for power in range(8)):
        step = mlp_step(Mlp.square(layers, 64, 64), Degrees(), chosen)
        program, ends = place(step, cluster, chosen), []
        for _ in range(trials + 2):
            simulate(program, cluster, chosen)
            ends.append(time.perf_counter())
        elapsed = [end - begin for begin, end in zip(ends[1:], ends[2:])]
        rows.append({"operations": program.num_ops, "milliseconds": 1e3 * statistics.median(elapsed)})
    return rows


def chrome_events(timeline: Timeline, rename: Mapping[str, str] = {}, scale: float = 1.0) -> list[dict]:
    """The list of Chrome trace events that DistIR's simulator returns; `ts` and `dur` are seconds times `scale`."""
    names = [rename.get(name, name) for name in timeline.names]
    columns = zip(timeline.name.tolist(), timeline.start.tolist(), timeline.duration.tolist(), timeline.device.tolist())
    return [
        {"name": names[name], "ph": "X", "ts": scale * start, "dur": scale * duration, "pid": 0, "tid": device}
        for name, start, duration, device in columns
    ]


def run_notebook(out: Path, rules: str = "corrected", trials: int = 5) -> dict:
    """Runs all experiments.

    Writes tables (CSV and JSON), the five plots of the notebook, and pictures and a trace of the fastest pipelined plan
    into `out`.

    With DistIR's rule sets, the trace is also written in DistIR's format (`best_pipeline_distir.json`).

    Returns:
      `rules`; `sequential`, samples/s of one device; `best` and `best_pipeline`, the fastest rows of all plans and of
      those with pipeline parallelism; the numbers `plans` and `rejected`; and the folder `out_dir`.
    """
    chosen, alone = notebook_rules(rules), one_plan(rules=rules)
    rows, rejected = grid(rules)
    scaling = simulator_scaling(rules, trials)
    tables = {f"{axis}_parallelism": isolated(axis, rules) for axis in ISOLATED}
    for axis, (name, table) in zip(ISOLATED, tables.items()):
        shown = [row for row in table if row["degree"] <= 64]  # the notebook simulates 128 replicas but plots up to 64
        plot_columns(shown, "degree", "throughput", out / f"{name}.pdf", ISOLATED[axis][0])
    for name, table in {**tables, "simulator_scaling": scaling, "grid_search": [alone, *rows]}.items():
        write_csv(table, out / f"{name}.csv")
        write_json(table, out / f"{name}.json")
    plot_columns(scaling, "operations", "milliseconds", out / "simulator_scaling.pdf")
    plot_columns(rows, "hp_degree", "throughput", out / "grid_search.pdf", "num_microbatches", "dp_degree")
    memory = out / "memory_against_throughput.pdf"
    plot_columns(rows, "throughput", "peak_memory", memory, "pp_degree", log="", line="")
    piped = max((row for row in rows if row["pp_degree"] > 1), key=lambda row: row["throughput"])
    plan = Degrees(*(piped[name] for name in ("dp_degree", "hp_degree", "pp_degree", "num_microbatches")))
    timeline = simulate_mlp(MODEL, plan, notebook_cluster(WORLD, chosen), chosen).timeline()
    plot_gantt(timeline, out / "best_pipeline.pdf")
    plot_memory(timeline, out / "best_pipeline_memory.pdf")
    write_perfetto(timeline, out / "best_pipeline.json.gz")
    if chosen.original:
        (out / "best_pipeline_distir.json").write_text(json.dumps(chrome_events(timeline, DISTIR_NAMES, 1e6)))
    best = max(rows, key=lambda row: row["throughput"])
    return {
        "rules": rules, "sequential": alone["throughput"], "best": best, "best_pipeline": piped, "plans": len(rows),
        "rejected": len(rejected), "out_dir": str(out),
    }  # fmt: skip
