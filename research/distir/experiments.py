"""The experiments of DistIR's notebook, `euromlsys21_mlp_grid_search_results.ipynb`, under any rule set.

`python plan.py experiment=distir_mlp rules=notebook` repeats them; `rules=corrected` (the default) repeats them with
the right units, where the notebook's conclusion does not hold.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.gantt import plot_gantt
from mstrain.simulator.placement import Degrees
from mstrain.simulator.plots import plot_memory
from mstrain.simulator.simulate import place, simulate
from mstrain.timeline import Timeline, write_perfetto
from research.distir import plots
from research.distir.grid import Rejected, Row, grid_search, make_row, simulate_mlp, write_table
from research.distir.mlp import Mlp, StepOptions
from research.distir.rules import DISTIR_NAMES, RuleSet, rule_set
from research.distir.transform_mlp import mlp_step

MODEL = Mlp.square(64, 8192, 8192)
WORLD = 16
# Per axis: what its lines differ in, the values of that, and the degrees.
ISOLATED = {
    "data": ("batch", (512, 1024, 2048, 4096), (2, 4, 8, 16, 32, 64, 128)),
    "horizontal": ("width", (1024, 2048, 4096, 8192), (2, 4, 8, 16, 32, 64)),
    "pipeline": ("batch", (512, 1024, 2048, 4096), (2, 4, 8, 16, 32, 64)),
}


def notebook_cluster(num_workers: int, rules: RuleSet) -> Cluster:
    """The notebook's devices: 1e14 flop/s, 1.2e12 bytes/s, 200 Gbit/s; a root if the rules have one."""
    device = Device(flops=1e14, memory_bandwidth=1.2e12)
    return Cluster.homogeneous(num_workers + rules.first, device, Switch(200 * GIGABIT))


def options_for(rules: RuleSet) -> StepOptions:
    """The notebook's step has no optimizer and no gathers; only the corrected step updates its weights."""
    return StepOptions(optimizer=not rules.original, gather_outputs=False)


def sequential(rules: str | RuleSet = "corrected") -> Row:
    """One device, the whole batch."""
    return _row(MODEL, Degrees(), rule_set(rules))


def _row(mlp: Mlp, degrees: Degrees, rules: RuleSet) -> Row:
    options = options_for(rules)
    result = simulate_mlp(mlp, degrees, notebook_cluster(degrees.world, rules), rules, options)
    return make_row(mlp, degrees, result, options)


def grid(rules: str | RuleSet = "corrected", world: int = WORLD) -> tuple[list[Row], list[Rejected]]:
    """Every (data, tensor, pipeline, microbatches) plan for `world` devices."""
    rules = rule_set(rules)
    return grid_search(MODEL, world, notebook_cluster(world, rules), rules, options_for(rules))


def isolated(axis: str, rules: str | RuleSet = "corrected") -> list[dict]:
    """Throughput as one degree grows and the others stay 1: rows with the series value, degree and throughput.

    `axis` is data, horizontal (tensor) or pipeline (8 microbatches).
    """
    series, values, degrees = ISOLATED[axis]
    rows = []
    for value in values:
        mlp = Mlp.square(128, value, 8192) if axis == "horizontal" else Mlp.square(64, 8192, value)
        for degree in degrees:
            plan = {
                "data": Degrees(data=degree),
                "horizontal": Degrees(tensor=degree),
                "pipeline": Degrees(pipeline=degree, microbatches=8),
            }[axis]
            rows.append({series: value, "degree": degree, "throughput": _row(mlp, plan, rule_set(rules)).throughput})
    return rows


def simulator_scaling(rules: str | RuleSet = "corrected", trials: int = 5) -> list[dict]:
    """Milliseconds to simulate 32 to 4096 layers on one device (median of `trials`), by number of operations.

    The program is built and compiled code warmed up before the clock starts, as in the notebook.
    """
    rules = rule_set(rules)
    cluster = notebook_cluster(1, rules)
    rows = []
    for layers in (32 << power for power in range(8)):
        step = mlp_step(Mlp.square(layers, 64, 64), Degrees(), rules, options_for(rules))
        program = place(step, cluster, rules)
        simulate(program, cluster, rules)
        elapsed = []
        for _ in range(trials):
            begin = time.perf_counter()
            simulate(program, cluster, rules)
            elapsed.append(time.perf_counter() - begin)
        rows.append({"operations": program.num_ops, "milliseconds": 1e3 * statistics.median(elapsed)})
    return rows


def _draw(out: Path, rows: list[Row], scaling: list[dict], series: dict[str, list[dict]]) -> None:
    plots.plot_grid(rows, out / "grid_search.pdf")
    labels = "Operations", "Simulation time (ms)"
    plots.plot_lines(scaling, "operations", "milliseconds", None, out / "simulator_scaling.pdf", labels)
    for axis, table in series.items():
        # The notebook simulates 128 replicas but draws 64.
        shown = [row for row in table if row["degree"] <= 64]
        labels = f"{axis.capitalize()} parallel degree", "Throughput (samples/second)"
        plots.plot_lines(shown, "degree", "throughput", ISOLATED[axis][0], out / f"{axis}_parallelism.pdf", labels)
    plots.plot_memory_against_throughput(rows, out / "memory_against_throughput.pdf")


def chrome_events(timeline: Timeline, rename: Mapping[str, str] = {}, scale: float = 1.0) -> list[dict]:
    """The bare event array of DistIR's simulator: name, ph, ts, dur (seconds times `scale`), pid 0, tid = device."""
    names = [rename.get(name, name) for name in timeline.names]
    columns = zip(timeline.name.tolist(), timeline.start.tolist(), timeline.duration.tolist(), timeline.device.tolist())
    return [
        {"name": names[name], "ph": "X", "ts": scale * start, "dur": scale * duration, "pid": 0, "tid": device}
        for name, start, duration, device in columns
    ]


def run_notebook(out_dir: str | Path, rules: str | RuleSet = "corrected", trials: int = 5) -> dict:
    """All experiments: CSV and JSON tables, the five plots, pictures and a trace of the best pipelined plan.

    DistIR's rule sets also write the trace as DistIR does (`best_pipeline_distir.json`).

    Returns a summary with throughputs in samples/s: `sequential`, `best` (the best row of the grid),
    `best_pipeline`, `plans`, `rejected` and the directory `out_dir`.
    """
    rules, out = rule_set(rules), Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    alone = sequential(rules)
    rows, rejected = grid(rules)
    scaling = simulator_scaling(rules, trials)
    series = {axis: isolated(axis, rules) for axis in ISOLATED}
    tables = {f"{axis}_parallelism": table for axis, table in series.items()} | {"simulator_scaling": scaling}
    for name, table in {**tables, "grid_search": [asdict(row) for row in (alone, *rows)]}.items():
        write_table(table, out / name)
    _draw(out, rows, scaling, series)
    best = max(rows, key=lambda row: row.throughput)
    piped = max((row for row in rows if row.pp_degree > 1), key=lambda row: row.throughput)
    plan = Degrees(piped.dp_degree, piped.hp_degree, piped.pp_degree, piped.num_microbatches)
    timeline = simulate_mlp(MODEL, plan, notebook_cluster(WORLD, rules), rules, options_for(rules)).timeline()
    plot_gantt(timeline, out / "best_pipeline.pdf")
    plot_memory(timeline, out / "best_pipeline_memory.pdf")
    write_perfetto(timeline, out / "best_pipeline.json.gz")
    if rules.original:
        (out / "best_pipeline_distir.json").write_text(json.dumps(chrome_events(timeline, DISTIR_NAMES, 1e6)))
    return {
        "rules": rules.name,
        "sequential": alone.throughput,
        "best": asdict(best),
        "best_pipeline": asdict(piped),
        "plans": len(rows),
        "rejected": len(rejected),
        "out_dir": str(out),
    }
