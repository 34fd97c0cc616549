"""The best plan of a mixed cluster, simulated on all of its devices."""

import gzip
import json
from dataclasses import replace

import pytest

from mstrain.commands import plan as command
from mstrain.hardware.hosts import read_hosts
from mstrain.planner.clock import Clock, OutOfTime
from mstrain.planner.mixed import simulated
from mstrain.planner.mixed.options import PlanOptions
from mstrain.planner.mixed.search import plan_optimal
from mstrain.planner.mixed.simulated import allocate, mixed_cluster, simulate_mixed

SIZES = {"hidden_size": 64, "sequence_length": 128, "vocab_size": 512}


def planned(files, **given):
    options = PlanOptions(**{"num_layers": 4, "batch": 6, **SIZES, **given})
    return plan_optimal(*files, options), options, read_hosts(*files[:2])


def test_one_device_takes_what_the_cost_model_says(small_cluster):
    """Nothing waits and nothing is communicated, so both add up the same profile."""
    result, options, hosts = planned(small_cluster([("fast", 1)], memory_gb=4.0).files)
    simulated = simulate_mixed(result.best, options, hosts)
    wanted = pytest.approx(1e-3 * result.best.cost_ms, rel=1e-6)
    assert simulated.result.seconds == wanted == simulated.predicted_seconds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_simulator_stays_near_the_cost_model_and_keeps_its_memory(inputs, schedule):
    """It may hide messages and the batch generator; on top of memory come messages on their way."""
    options = PlanOptions(num_layers=10, batch=128, schedule=schedule, top_k=8)
    files = inputs(10, 16)
    for plan in plan_optimal(*files, options).plans:
        simulated = simulate_mixed(plan, options, read_hosts(*files[:2]))
        message = plan.microbatch * options.sequence_length * options.hidden_size * options.element_bytes / 1e9
        assert 0.9 < (1e3 * simulated.result.seconds) / (1e3 * simulated.predicted_seconds) < 1.05
        for row in simulated.stages:
            assert row["simulated_compute_ms"] == pytest.approx(row["compute_ms"], rel=1e-5)
            assert -1e-6 < row["simulated_memory_gb"] - row["memory_gb"] < 3 * message


def test_tensor_collectives_between_nodes_take_what_the_cost_model_says(small_cluster):
    """One stage, one replica over two nodes of one device: nothing overlaps, so the times are equal."""
    files = small_cluster([("fast", 1), ("fast", 1)], memory_gb=0.35).files
    result, options, hosts = planned(files, optimizer_factor=4.0, top_k=20)
    plan = next(plan for plan in result.plans if plan.stages[0].tp == 2)
    simulated = simulate_mixed(plan, options, hosts)
    assert plan.stages[0].tensor_ms > 0
    assert (1e3 * simulated.result.seconds) == pytest.approx((1e3 * simulated.predicted_seconds), rel=1e-6)


def test_sharded_state_of_a_stage_is_that_of_the_cost_model(small_cluster):
    files = small_cluster([("fast", 2), ("slow", 2)]).files
    result, options, hosts = planned(files, shard_optimizer=True, top_k=12)
    for plan in result.plans:
        for row in simulate_mixed(plan, options, hosts).stages:
            assert row["simulated_memory_gb"] == pytest.approx(row["memory_gb"], rel=0.01)


def test_every_device_has_one_stage_and_no_stage_straddles_nodes(small_cluster):
    hosts = [("fast", 2), ("slow", 4), ("fast", 4), ("slow", 4), ("fast", 2)]
    result, options, cluster = planned(small_cluster(hosts, num_layers=6).files, num_layers=6, batch=12, top_k=40)
    network = mixed_cluster(cluster, 0.0).network
    for plan in result.plans:
        taken: list[int] = []
        for stage, devices in zip(plan.stages, allocate(cluster, plan.stages)):
            assert {label: len(mine) for label, mine in devices.items()} == stage.devices
            for mine in devices.values():
                nodes = [network.node_of[device] for device in mine]
                whole = [cluster.nodes[node].slots == nodes.count(node) for node in nodes]
                assert all(whole) or len(set(nodes)) == 1
                taken += mine
        assert len(taken) == len(set(taken)) == cluster.num_devices - plan.idle_devices


def test_messages_between_nodes_share_the_link_of_a_node(small_cluster):
    _, _, hosts = planned(small_cluster([("fast", 2), ("slow", 2)], memory_gb=4.0).files)
    network = mixed_cluster(hosts, 0.5).network
    inside, one, two = network.path(0, 1), network.path(0, 2), network.path(1, 3)
    assert inside.bandwidth == 40e9 and not set(inside.wires) & set(one.wires)
    assert one.wires == two.wires and one.bandwidth == 1e9 and one.latency == 5e-4


def test_few_microbatches_stand_for_many(small_cluster):
    result, options, hosts = planned(small_cluster([("fast", 2), ("slow", 2)]).files, batch=64)
    many = replace(result.best, microbatches=64)
    simulated = simulate_mixed(many, replace(options, simulated_microbatches=8), hosts)
    assert simulated.microbatches == 8 < many.microbatches


def test_command_writes_the_simulation(small_cluster, tmp_path, capsys):
    hosts, cluster, profiles = small_cluster([("fast", 2), ("slow", 2)]).files
    folder = tmp_path / "run"
    arguments = [f"hostfile={hosts}", f"clusterfile={cluster}", f"profiles={profiles}", f"run_dir={folder}"]
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    assert command.main([*arguments, *sizes, "num_layers=4", "batch=6"]) == 0
    printed = capsys.readouterr().out
    assert "cost model | simulator" in printed and "Simulated step: " in printed
    document = json.loads((folder / "simulation.json").read_text())
    assert document["stages"][0]["simulated_compute_ms"] > 0
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    parts = {event["args"].get("part") for event in trace["traceEvents"] if "args" in event}
    assert any(part and part.startswith("layers") for part in parts)
    for name in ("gantt.png", "memory.png", "memory_by_category.png"):
        assert (folder / name).stat().st_size > 0


def test_a_cluster_too_large_for_the_time_left_is_not_written(small_cluster, monkeypatch):
    result, options, hosts = planned(small_cluster([("fast", 2), ("slow", 2)]).files, batch=64)
    monkeypatch.setattr(simulated, "MixedStep", lambda *args: pytest.fail("its program was written"))
    with pytest.raises(OutOfTime):
        simulate_mixed(result.best, options, hosts, Clock(1e-9))


def test_messages_between_many_replicas_count_against_the_time(small_cluster, monkeypatch):
    """Each replica of a stage may send to each of the next."""
    result, options, hosts = planned(small_cluster([("fast", 2), ("slow", 2)]).files, batch=64)
    stage = replace(result.best.stages[0], replicas={"fast": 10**5})
    monkeypatch.setattr(simulated, "MixedStep", lambda *args: pytest.fail("its program was written"))
    with pytest.raises(OutOfTime):
        simulate_mixed(replace(result.best, stages=(stage, stage)), options, hosts, Clock(1000.0))
