"""The experiments of the notebook: its results, the corrected results, and the files."""

import csv
import gzip
import json

import numpy as np
import pytest

from mstrain.display import gantt
from mstrain.display import plots as timelines
from mstrain.simulator import compared
from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.placement import Degrees
from research.distir import experiments
from research.distir.grid import degrees_grid, grid_search, simulate_mlp
from research.distir.mlp import Mlp

CHIP = Device(1e14, 1e12, memory_bytes=1.5e8)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    return folder, experiments.run_notebook(folder, "notebook", trials=1)


def test_headlines_of_the_notebook(notebook):
    _, summary = notebook
    assert summary["sequential"] == pytest.approx(3802.52, abs=0.01)
    assert summary["plans"] == 52 and summary["rejected"] == 0
    best, piped = summary["best"], summary["best_pipeline"]
    assert (best["dp_degree"], best["hp_degree"], best["pp_degree"]) == (4, 4, 1)
    assert best["throughput"] == pytest.approx(55313.0, abs=0.05)
    assert (piped["hp_degree"], piped["pp_degree"], piped["num_microbatches"]) == (8, 2, 16)
    assert piped["throughput"] == pytest.approx(46662.1, abs=0.05)


@pytest.mark.parametrize(
    "axis,value,expected",
    [
        ("data", 4096, [7313, 13748, 24548, 40424, 59745, 78505, 93127]),
        ("horizontal", 8192, [3740, 7242, 13619, 24328, 40092, 59306]),
        ("pipeline", 4096, [6135, 10016, 14630, 18922, 21934, 23286]),
    ],
)
def test_isolated_scaling_of_the_notebook(notebook, axis, value, expected):
    folder, _ = notebook
    rows = json.loads((folder / f"{axis}_parallelism.json").read_text())
    series = experiments.ISOLATED[axis][0]
    assert [round(row["throughput"]) for row in rows if row[series] == value] == expected


def test_files_of_the_notebook(notebook):
    folder, _ = notebook
    names = ["grid_search", "simulator_scaling", *(f"{axis}_parallelism" for axis in experiments.ISOLATED)]
    for name in [*names, "best_pipeline", "best_pipeline_memory", "memory_against_throughput"]:
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    for name in names:
        with open(folder / f"{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == len(json.loads((folder / f"{name}.json").read_text()))
    with open(folder / "grid_search.csv", newline="") as file:
        assert ",".join(next(csv.reader(file))).startswith(
            "model_size,world_size,batch_size,dp_degree,hp_degree,"
            "pp_degree,num_microbatches,latency,throughput,"
            "peak_memory"
        )
    with gzip.open(folder / "best_pipeline.json.gz", "rt") as file:
        assert {event["ph"] for event in json.load(file)["traceEvents"]} == {"M", "X", "C", "s", "f"}


def test_trace_as_distir_writes_it(notebook):
    events = json.loads((notebook[0] / "best_pipeline_distir.json").read_text())
    assert {event["name"] for event in events} >= {"MatMul", "MPIAllreduce", "Send"}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(
        1e6 * notebook[1]["best_pipeline"]["latency"]
    )


def test_head_and_corrected_rules_overturn_the_conclusion():
    def order(rules):
        rows, _ = experiments.grid(rules)
        rows.sort(key=lambda row: -row["throughput"])
        return [(row["dp_degree"], row["hp_degree"], row["pp_degree"], row["num_microbatches"]) for row in rows], rows

    plans, rows = order("head")
    by_plan = dict(zip(plans, (row["throughput"] for row in rows)))
    assert plans[0] == (1, 1, 16, 32) and experiments.one_plan(rules="head")["throughput"] == pytest.approx(3651, abs=1)
    expected = {(1, 1, 16, 32): 18633, (4, 4, 1, 1): 12163, (16, 1, 1, 1): 5616, (1, 16, 1, 1): 5538}
    assert {plan: round(by_plan[plan]) for plan in expected} == expected
    plans, _ = order("corrected")
    assert plans[0] == (1, 1, 16, 32) and plans.index((4, 4, 1, 1)) > 5


def test_simulation_time_is_that_of_all_operations():
    rows = experiments.simulator_scaling("corrected", trials=1)
    assert [row["operations"] for row in rows] == [4 * layers + 3 for layers in (32 << n for n in range(8))]
    assert all(row["milliseconds"] > 0 for row in rows)


def test_grid_covers_every_factorisation_of_any_world_size():
    plans = list(degrees_grid(12, 4096))
    assert {plan.world for plan in plans} == {12} and len(set(plans)) == len(plans)
    assert {(plan.data, plan.tensor) for plan in plans} == {
        (d, h) for d in range(1, 13) for h in range(1, 13) if 12 % (d * h) == 0
    }


def test_rejected_plans_come_with_reasons():
    mlp = Mlp.square(8, 2048, 4096)
    rows, rejected = grid_search(mlp, 12, Cluster.homogeneous(12, CHIP, Switch(25e9)))
    reasons = " ".join(reason for _, reason in rejected)
    assert rows and len(rows) + len(rejected) == len(list(degrees_grid(12, 4096)))
    for text in (
        "which 3 tensor ranks do not divide",
        "lower the pipeline degree",
        "raise a degree or lower",
    ):
        assert text in reasons
    assert all(row["peak_memory"] <= CHIP.memory_bytes for row in rows)


def test_gantt_shows_exactly_the_busy_time(tmp_path):
    result = simulate_mlp(Mlp.square(8, 512, 256), Degrees(2, 2, 2, 4), Cluster.homogeneous(8, CHIP, Switch(25e9)))
    timeline = result.timeline()
    kinds, edges = gantt.event_kinds(timeline), np.linspace(0, timeline.seconds, 41)
    busy = np.bincount(timeline.lane, weights=timeline.duration, minlength=len(timeline.lanes))
    seen = set()
    for row in gantt.rows_of(timeline, None, None):
        parts = gantt.busy_parts(timeline, kinds, row, edges)
        seen |= {gantt.KINDS[kind] for kind in np.flatnonzero(parts.sum(axis=1))}
        if row.compute:  # one lane; a link has two, of which the busier is drawn
            assert parts.sum() * timeline.seconds / 40 == pytest.approx(busy[list(row.lanes)].sum())
    assert {"forward", "backward", "optimizer", "all_reduce", "ppermute, send"} <= seen
    for draw in (gantt.plot_gantt, timelines.plot_memory):
        assert draw(timeline, tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_long_step_shows_its_end(tmp_path, monkeypatch):
    """The trace ends after so many events, the picture does not."""
    result = simulate_mlp(Mlp.square(8, 512, 256), Degrees(2, 2, 2, 4), Cluster.homogeneous(8, CHIP, Switch(25e9)))
    drawn = []
    monkeypatch.setattr(gantt, "draw", lambda axis, timeline, kinds, rows, *span: drawn.append((timeline, span)))
    monkeypatch.setattr(compared, "TRACE_EVENTS", 20)
    compared.Compared(result, 4, result.seconds, result.peak_bytes).write(tmp_path)
    timeline, span = drawn[0]
    assert span == (0.0, result.seconds) and timeline.seconds == result.seconds
