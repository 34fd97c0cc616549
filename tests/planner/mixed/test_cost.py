"""Terms of the cost by hand, output, and errors with their fix."""

import csv
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import read_profiles
from mstrain.planner.mixed.cost import all_reduce_ms, build_model, build_stage
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.result import write_result, write_stages
from mstrain.planner.mixed.search import plan_optimal
from mstrain.planner.mixed.space import Choice, Kind, check_size, choose_unit, divisor_chain, kinds_of, stage_sizes
from mstrain.planner.mixed.times import interpolate, share_samples

SIZES = {"hidden_size": 64, "sequence_length": 128, "vocab_size": 512}


def model_of(small, **options):
    cluster = read_hosts(*small.files[:2])
    profiles = read_profiles(small.profiles, cluster.device_types)
    given = PlanOptions(**{"num_layers": 4, "batch": 6, **SIZES, **options})
    return build_model(given, kinds_of(cluster), profiles)


def test_shares_minimise_the_slowest_replica():
    fast, slow = np.arange(0, 20) * 1.0, np.arange(0, 20) * 2.5
    best = min(max(1.0 * a, 2.5 * b) for a in range(10) for b in range(10) if 2 * a + b >= 7)
    shares = share_samples([fast, slow], [2, 1], 7)
    assert max(1.0 * shares[0], 2.5 * shares[1]) == best and 2 * shares[0] + shares[1] >= 7
    assert share_samples([fast], [1], 20) is None


def test_times_between_profiles_are_interpolated_and_never_fall(small_cluster):
    small = small_cluster([("fast", 2)])
    profiles = read_profiles(small.profiles)
    times = interpolate(profiles, "fast", 1, 100)
    four, eight = (np.array(profiles["fast", 1, batch].layer_ms) for batch in (4, 8))
    assert len(times.layer_ms) == 9 and times.total_ms[0] == 0
    assert times.layer_ms[6] == pytest.approx((four + eight) / 2)
    assert (np.diff(times.total_ms) >= 0).all()


def test_both_bandwidths_and_latency_enter_where_they_should(small_cluster):
    model = model_of(small_cluster([("fast", 2), ("fast", 2)]), latency_ms=0.25)
    inter, intra = 2.0, 40.0
    one_node = build_stage(model, Choice((2,), 1, (2,)), 2)
    assert one_node.exchange_ms == pytest.approx(1 / (intra * 1e6)) and one_node.exchange_latency_ms == 0.5
    two_nodes = build_stage(model, Choice((4,), 1, (4,)), 4)
    assert two_nodes.exchange_ms == pytest.approx(1 / (intra * 1e6) + 1 / (inter * 1e6))
    message = 128 * 64 * 2
    assert one_node.boundary_ms == pytest.approx(2 * (0.25 + message / (inter * 1e6)))
    assert one_node.tensor_ms.tolist() == [0.0]
    model = model_of(small_cluster([("fast", 1), ("fast", 1)]), latency_ms=0.25)
    across = build_stage(model, Choice((2,), 2, (1,)), 1)
    assert across.tensor_ms[0] == pytest.approx(4 * all_reduce_ms(2, message, inter, 0.25))
    assert all_reduce_ms(1, 1e9, inter, 0.25) == 0


def test_mixed_stage_runs_at_its_slowest_member(small_cluster):
    model = model_of(small_cluster([("fast", 2), ("slow", 2)]))
    spans = build_stage(model, Choice((1, 1), 2, (0, 0), spans=True), 3)
    assert spans.shares == (3, 3)
    mixed = build_stage(model, Choice((2, 2), 1, (2, 2)), 6)
    assert mixed.shares[0] > mixed.shares[1] and 2 * sum(mixed.shares) >= 6


def test_unequal_nodes_are_kinds_of_their_own_and_sizes_pack(small_cluster):
    small = small_cluster([("fast", 6), ("fast", 4), ("fast", 4)])
    kinds = kinds_of(read_hosts(*small.files[:2]))
    assert [(kind.devices, kind.slots) for kind in kinds] == [(8, 4), (6, 6)]
    assert divisor_chain(12) == [12, 6, 3, 1]
    assert stage_sizes(kinds[0], 1) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match="unit=5: choose a part"):
        choose_unit(PlanOptions(num_layers=4, batch=6, unit=5), kinds)
    with pytest.raises(ValueError, match="max_states=3 .*; type max_states=63 "):
        choose_unit(PlanOptions(num_layers=4, batch=6, max_states=3), kinds)


def test_json_and_csv_hold_every_term(small_cluster, tmp_path):
    result = plan_optimal(
        *small_cluster([("fast", 2), ("slow", 2)]).files, PlanOptions(num_layers=4, batch=6, top_k=2, **SIZES)
    )
    write_result(result, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    best = document["plans"][0]
    terms = (best["steady_ms"], best["fill_ms"], best["end_ms"], best["generator_ms"])
    assert sum(terms) == pytest.approx(best["cost_ms"])
    for stage in best["stages"]:
        parts = (stage["compute_ms"], stage["tensor_ms"], stage["sync_ms"], stage["boundary_ms"])
        assert sum(parts) == pytest.approx(stage["stage_ms"])
        assert stage["state_gb"] + stage["activation_gb"] <= stage["usable_gb"]
    assert document["certificate"]["proven"] is True and document["gap"] == pytest.approx(0, abs=1e-9)
    write_stages(result, tmp_path / "plan.csv")
    rows = list(csv.DictReader((tmp_path / "plan.csv").open()))
    assert len(rows) == sum(len(plan.stages) for plan in result.plans)
    assert float(rows[0]["cost_ms"]) == result.best.cost_ms and "=" in rows[0]["devices"]


def test_cluster_on_which_nothing_fits_says_how_much_is_needed(small_cluster):
    files = small_cluster([("fast", 2), ("slow", 2)], memory_gb=0.05).files
    with pytest.raises(ValueError, match="layer needs 0.12 GB per device and 0.0[45]+ GB are usable"):
        plan_optimal(*files, PlanOptions(num_layers=4, batch=6, **SIZES))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"batch": 0}, "batch=0 is too small"),
        ({"schedule": "zigzag"}, "schedule=zigzag is unknown"),
        ({"memory_margin": 1.5}, "memory_margin=1.5 is not a fraction"),
        ({"latency_ms": -1.0}, "latency_ms=-1.0 is too small"),
        ({"num_layers": 5}, "has 4 layers, the model has 5"),
    ],
)
def test_bad_options_name_the_fix(small_cluster, change, says):
    files = small_cluster([("fast", 2)]).files
    with pytest.raises(ValueError, match=says):
        plan_optimal(*files, PlanOptions(**{"num_layers": 4, "batch": 6, **change}))


@pytest.mark.parametrize("kinds, unit, seconds, says", [
    (6, 4, 60, "174404.8 GB"), (3, 1, 5, "a bound 14 s. Type a larger unit=,"), (3, 1, 60, None), (2, 2, 5, None),
])  # fmt: skip
def test_a_space_that_memory_or_time_do_not_allow_is_refused(kinds, unit, seconds, says):
    """Before its tables are made, whatever max_states= or unit= asked for it."""
    nodes = tuple(Kind(f"kind {n}", 64, 8, 100.0, 10.0, 16.0) for n in range(kinds))
    options = PlanOptions(num_layers=10, batch=8, max_seconds=seconds)
    if says is None:
        return check_size(options, nodes, unit)
    with pytest.raises(ValueError, match=says):
        check_size(options, nodes, unit)


@pytest.mark.parametrize("kinds, devices, seconds", [(2, 512, 60), (3, 64, 0.001), (6, 512, 60)])
def test_what_the_message_of_max_states_suggests_is_accepted(kinds, devices, seconds):
    """The states, with a time budget where theirs outlasts the given one; none whose tables memory does not allow."""
    nodes = tuple(Kind(f"kind {n}", devices, 8, 100.0, 10.0, 16.0) for n in range(kinds))
    options = PlanOptions(num_layers=10, batch=8, max_states=10, max_seconds=seconds)
    with pytest.raises(ValueError, match="more than max_states=10 ") as error:
        choose_unit(options, nodes)
    typed: dict[str, Any] = {
        key: int(value) for key, value in re.findall(r"(max_\w+)=(\d+)", str(error.value).partition(";")[2])
    }
    assert list(typed) == {2: ["max_states"], 3: ["max_states", "max_seconds"], 6: []}[kinds]
    if typed:
        changed = dataclasses.replace(options, **typed)
        check_size(changed, nodes, choose_unit(changed, nodes))
    else:
        with pytest.raises(ValueError, match="too many for memory"):
            check_size(options, nodes, nodes[0].slots)


def test_a_model_without_parameters_is_refused(small_cluster):
    files = small_cluster([("fast", 1)]).files
    path = files[2] / "DeviceType.fast_tp2_bs4.json"
    document = json.loads(path.read_text())
    document["model"]["parameters"]["parameters_per_layer_bytes"] = [0] * 4
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="fast_tp2_bs4.json: parameters_per_layer_bytes adds up to 0; write"):
        plan_optimal(*files, PlanOptions(num_layers=4, batch=6, **SIZES))


def test_microbatches_cover_any_batch():
    for batch in (1, 7, 12, 96):
        pairs = list(PlanOptions(num_layers=4, batch=batch).microbatches())
        assert sorted(count for _, count in pairs) == sorted({-(-batch // size) for size in range(1, batch + 1)})
        assert all((count - 1) * size < batch <= count * size for size, count in pairs)
        assert (batch, 1) in pairs and (1, batch) in pairs
