"""The planner against brute force: the optimum, the top k, and the certificate."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from mstrain.hardware.hosts import read_hosts
from mstrain.hardware.layer_profiles import read_profiles
from mstrain.planner.mixed.cost import build_model, build_stage
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.search import plan_optimal
from mstrain.planner.mixed.space import choices, choose_unit, kinds_of
from mstrain.planner.mixed.tables import Box
from mstrain.planner.mixed.times import degrees_of
from tests.planner.mixed.conftest import SmallCluster

SIZES = {"hidden_size": 64, "sequence_length": 128, "vocab_size": 512}


def pipelines(all_choices, free, num_stages):
    """Every sequence of choices that the free devices allow."""
    if num_stages == 0:
        yield ()
        return
    for choice in all_choices:
        if all(need <= have for need, have in zip(choice.devices, free)):
            left = tuple(have - need for need, have in zip(choice.devices, free))
            for rest in pipelines(all_choices, left, num_stages - 1):
                yield (choice, *rest)


def stage_cost(model, stage, begin, end, flight):
    """(stage ms, end ms) or None when memory does not suffice, by plain loops."""
    layers, parameters = model.layers, model.parameter_bytes[end] - model.parameter_bytes[begin]
    slowest = 0.0
    for row, share in enumerate(stage.shares):
        time_of = model.times[stage.choice.kinds[row], stage.choice.tp]
        ms = sum(time_of.layer_ms[share][layer] for layer in range(begin, end))
        ms += sum(stage.tensor_ms[row] for layer in range(begin, end) if 0 < layer < layers - 1)
        if end == layers:
            ms += time_of.sync_ms[share]
        slowest = max(slowest, ms)
        kept = model.activation_bytes[end] - model.activation_bytes[begin]
        held = flight * share * kept / stage.choice.tp + stage.state_bytes * parameters
        if held > stage.memory_bytes[row]:
            return None
    return (
        slowest + (stage.boundary_ms if begin else 0.0),
        stage.exchange_latency_ms + (stage.exchange_ms + stage.update_ms) * parameters,
    )


def brute_force(files, options):
    """Cheapest cost of every distinct plan: microbatch size and stages in any order."""
    cluster = read_hosts(*files[:2])
    profiles = read_profiles(files[2], cluster.device_types)
    kinds = kinds_of(cluster)
    model = build_model(options, kinds, profiles)
    degrees = [degrees_of(profiles, kind.name, options.max_tp) for kind in kinds]
    all_choices = list(choices(kinds, choose_unit(options, kinds), degrees))
    costs = {}
    for samples in range(1, options.batch + 1):
        count = math.ceil(options.batch / samples)
        if math.ceil(options.batch / count) != samples:
            continue
        stages = {choice: build_stage(model, choice, samples) for choice in all_choices}
        usable = [choice for choice, stage in stages.items() if stage is not None]
        for num_stages in range(1, options.num_layers + 1):
            for plan in pipelines(usable, tuple(kind.devices for kind in kinds), num_stages):
                for cuts in itertools.combinations(range(1, options.num_layers), num_stages - 1):
                    bounds = [0, *cuts, options.num_layers]
                    parts = []
                    for index, choice in enumerate(plan):
                        flight = count if options.schedule == "gpipe" else min(count, num_stages - index)
                        parts.append(stage_cost(model, stages[choice], *bounds[index : index + 2], flight))
                        if parts[-1] is None:
                            break
                    if parts[-1] is None:
                        continue
                    times, ends = zip(*parts)
                    generator = max(model.generator_ms[kind] for kind in plan[0].kinds)
                    cost = (count - 1) * max(times) + sum(times) + max(ends) + count * generator
                    name = samples, tuple(sorted(map(repr, plan)))
                    costs[name] = min(cost, costs.get(name, math.inf))
    return sorted(costs.values())


CASES = [
    ([("fast", 2), ("slow", 2)], {}, {}),
    ([("fast", 2), ("slow", 2)], {"seed": 1}, {"batch": 7, "latency_ms": 0.5}),
    ([("fast", 2), ("slow", 2)], {"seed": 2, "memory_gb": 0.5}, {"schedule": "gpipe", "batch": 5}),
    ([("fast", 2), ("slow", 2)], {"seed": 3, "memory_gb": 0.3}, {"shard_optimizer": True}),
    ([("fast", 2), ("fast", 1), ("slow", 1)], {"seed": 4}, {"collectives_in_profile": False}),
    ([("slow", 3)], {"seed": 5, "num_layers": 5}, {"batch": 9, "element_bytes": 4}),
    ([("fast", 1), ("fast", 1), ("fast", 1)], {"seed": 6}, {"batch": 3, "hidden_size": 2048}),
]


@pytest.mark.parametrize("hosts, cluster, given", CASES)
def test_top_plans_are_those_of_brute_force(small_cluster, hosts, cluster, given):
    files = small_cluster(hosts, **cluster).files
    options = PlanOptions(**{"num_layers": cluster.get("num_layers", 4), "batch": 6, "top_k": 4, **SIZES, **given})
    expected = brute_force(files, options)
    result = plan_optimal(*files, options)
    assert [plan.cost_ms for plan in result.plans] == pytest.approx(expected[:4], rel=1e-9)
    assert result.certificate.proven and result.gap == pytest.approx(0.0, abs=1e-9)
    assert result.certificate.lower_bound_ms <= result.best.cost_ms


def test_the_batch_generator_is_that_of_the_first_stage(small_cluster):
    """Generators of the types take 0.2 and 0.54 ms a microbatch; those of idle and later devices do not count."""
    files = small_cluster([("fast", 2), ("slow", 2)]).files
    result = plan_optimal(*files, PlanOptions(num_layers=4, batch=6, top_k=20, **SIZES))
    seen = set()
    for plan in result.plans:
        slowest = max({"fast": 0.2, "slow": 0.54}[label.split()[0]] for label in plan.stages[0].devices)
        assert plan.generator_ms == pytest.approx(plan.microbatches * slowest)
        seen.add((slowest, len(plan.stages[0].devices)))
    assert (0.2, 1) in seen and any(slowest == 0.54 for slowest, _ in seen)


def random_case(random):
    """(hosts, keywords of the cluster, options) of a cluster of at most five devices."""
    hosts, free = [], int(random.integers(2, 6))
    while free:
        slots = int(random.integers(1, min(free, 3) + 1))
        hosts.append((str(random.choice(["fast", "slow"])), slots))
        free -= slots
    num_layers = int(random.integers(2, 5 if len(hosts) < 4 else 4))
    cluster = {
        "num_layers": num_layers,
        "seed": int(random.integers(1000)),
        "memory_gb": float(random.choice([0.2, 0.3, 0.45, 1.0])),
        "batches": (1, 2, 4) if random.random() < 0.3 else (1, 2, 4, 8),
    }
    options = PlanOptions(
        num_layers=num_layers,
        batch=int(random.integers(1, 8)),
        hidden_size=int(random.choice([64, 2048])),
        sequence_length=128,
        vocab_size=512,
        schedule=str(random.choice(["1f1b", "gpipe"])),
        shard_optimizer=bool(random.integers(2)),
        collectives_in_profile=bool(random.integers(2)),
        latency_ms=float(random.choice([0.0, 0.01, 0.5])),
        top_k=int(random.integers(1, 7)),
    )
    return hosts, cluster, options


def test_random_clusters_are_planned_as_by_brute_force(tmp_path):
    """One process searches them all, one after the other, as a service would."""
    outcomes = {"impossible": 0, "bound by memory": 0, "mixed": 0}
    for seed in range(120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        hosts, cluster, options = random_case(np.random.default_rng(seed))
        files = SmallCluster(folder, hosts, **cluster).files
        expected = brute_force(files, options)
        if not expected:
            outcomes["impossible"] += 1
            with pytest.raises(ValueError, match="usable|no division"):
                plan_optimal(*files, options)
            continue
        result = plan_optimal(*files, options)
        costs = [plan.cost_ms for plan in result.plans]
        assert costs == pytest.approx(expected[: options.top_k], rel=1e-9), (seed, hosts, cluster, options)
        assert result.certificate.proven and result.certificate.lower_bound_ms <= costs[0]
        outcomes["bound by memory"] += cluster["memory_gb"] < 0.5
        outcomes["mixed"] += any(len(stage.devices) > 1 for stage in result.best.stages)
    assert min(outcomes.values()) >= 2, f"the random cases no longer cover {outcomes}"


def test_a_box_knows_only_its_own_tails():
    """A box does not use cached tails of another box, even if it has the same address in memory."""
    box = Box(None, (0.0, 1.0), (0.0, 1.0), None)
    box.expanded[0, 0] = ["a tail"]
    assert replace(box, slowest=(0.5, 1.0)).expanded == {}
    assert Box(None, (0.0, 1.0), (0.0, 1.0), None).expanded == {}


def test_memory_changes_the_plan(small_cluster):
    """The cases above test memory limits only if the optimum depends on them."""
    ample, tight = (
        brute_force(
            small_cluster([("fast", 2), ("slow", 2)], seed=3, memory_gb=memory).files,
            PlanOptions(num_layers=4, batch=6, **SIZES),
        )[0]
        for memory in (1.0, 0.28)
    )
    assert tight > ample


def test_time_budget_leaves_a_plan_and_an_honest_bound(small_cluster, monkeypatch):
    files = small_cluster([("fast", 2)] * 4 + [("slow", 2)] * 4, num_layers=8).files
    options = PlanOptions(num_layers=8, batch=16, **SIZES)
    whole = plan_optimal(*files, options)
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))  # one second per look at the clock
    hasty = plan_optimal(*files, replace(options, max_seconds=18.0))
    monkeypatch.undo()
    assert whole.certificate.proven and whole.gap <= 1e-9
    assert hasty.certificate.lower_bound_ms <= whole.best.cost_ms <= hasty.best.cost_ms * (1 + 1e-12)
    assert not hasty.certificate.proven and 0 < hasty.gap < 1
    with pytest.raises(ValueError, match="raise max_seconds"):
        plan_optimal(*files, replace(options, max_seconds=1e-9))


@pytest.mark.parametrize("num_layers, per_type", [(10, 16), (40, 128)])
def test_rows_1_and_4_of_metis_are_planned_completely(inputs, num_layers, per_type):
    files = inputs(num_layers, per_type)
    options = PlanOptions(num_layers=num_layers, batch=128, top_k=3)
    result = plan_optimal(*files, options)
    assert result.certificate.proven
    for plan in result.plans:
        bounds = [stage.first_layer for stage in plan.stages] + [plan.stages[-1].end_layer]
        assert bounds[0] == 0 and bounds[-1] == num_layers and bounds == sorted(set(bounds))
        assert sum(sum(stage.devices.values()) for stage in plan.stages) + plan.idle_devices == 2 * per_type
