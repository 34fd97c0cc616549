"""Hand-written programs, traces, live memory and the measured table agree with the original."""

import numpy as np
import pytest

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.placement import Degrees, Placement
from mstrain.simulator.simulate import simulate
from research.distir.mlp import Mlp, StepOptions
from research.distir.rules import DISTIR_NAMES, RULES, rule_set
from research.distir.traces import chrome_events
from research.distir.transform_mlp import mlp_step
from tests.simulator.builder import ProgramBuilder
from tests.simulator.measures import device_seconds

CLUSTER = Cluster.homogeneous(3, Device(1.4e13, 9e11), Switch(25 * GIGABIT))
W = (512, 512)


def find(distir, name):
    return next(case for case in distir["cases"] if case["id"] == name)["expected"]


def checkpointing(recompute: bool):
    """Two layers on one device, the first activation kept or recomputed."""
    build = ProgramBuilder(2)
    build.input((1,), 0, nbytes=4)
    w1, w2, x, y = (build.input(W, 0) for _ in range(4))

    def layer(left, right):
        return build.op("MatMul", (W, W), (0,), (left, right), [(W, 0)])[0]

    a = layer(x, w1)
    p = layer(a, w2)
    (g,) = build.op("LossGrad", (W,), (0,), (p, y), [(W, 0)])
    a = layer(x, w1) if recompute else a
    da, dw2 = build.op("MatMulGrad", (W, W), (0,), (a, w2, g), [(W, 0)] * 2)
    _, dw1 = build.op("MatMulGrad", (W, W), (0,), (x, w1, da), [(W, 0)] * 2)
    build.op("SGD", (W, W), (0,), (w1, w2, dw1, dw2))
    return build.build()


def replicated():
    """Two layers on two devices with replicated weights, gradients summed, one optimizer over both."""
    build, rows = ProgramBuilder(2), (256, 512)
    for device in (0, 1):
        build.input((1,), device, nbytes=4)
    w = {(layer, device): build.input(W, device) for layer in (1, 2) for device in (0, 1)}
    x, y = [build.input(rows, d) for d in (0, 1)], [build.input(rows, d) for d in (0, 1)]

    def each(kind, shapes, inputs, outputs=1):
        shape_of = (rows, W)
        return [
            build.op(kind, shapes, (d,), inputs(d), [(shape_of[n], d) for n in range(outputs)])
            for d in (0, 1)
        ]

    a = each("MatMul", (rows, W), lambda d: (x[d], w[1, d]))
    p = each("MatMul", (rows, W), lambda d: (a[d][0], w[2, d]))
    g = each("LossGrad", (rows,), lambda d: (p[d][0], y[d]))
    second = each("MatMulGrad", (rows, W), lambda d: (a[d][0], w[2, d], g[d][0]), 2)
    first = each("MatMulGrad", (rows, W), lambda d: (x[d], w[1, d], second[d][0]), 2)
    sums = [
        build.op("AllReduce", (W,), (0, 1), [grad[d][1] for d in (0, 1)], [(W, 0), (W, 1)])
        for grad in (first, second)
    ]
    weights = [w[1, 0], w[1, 1], w[2, 0], w[2, 1]]
    build.op("SGD", (W,) * 4, (0, 1), (*weights, *sums[0], *sums[1]))
    return build.build()


@pytest.mark.parametrize(
    "name,program",
    [
        ("head-memory-gradient-checkpointing-base", checkpointing(False)),
        ("head-memory-gradient-checkpointing-opt", checkpointing(True)),
    ],
)
def test_live_memory_of_checkpointing(distir, name, program):
    wanted = find(distir, name)
    result = simulate(program, CLUSTER, rule_set("head"))
    assert result.num_events == wanted["trace_events"]
    assert result.seconds == pytest.approx(wanted["latency_s"], rel=1e-12)
    time, total = result.memory.timelines()[0]
    np.testing.assert_allclose(np.c_[time, total], wanted["live_memory_timeline_by_device"]["0"], rtol=1e-12)
    assert result.memory.peak_bytes == {0: wanted["peak_memory_bytes_by_device"]["0"]}


def test_live_memory_of_replicated_weights(distir):
    wanted = find(distir, "head-memory-zero-base")
    result = simulate(replicated(), CLUSTER, rule_set("head"))
    assert result.num_events == wanted["trace_events"]
    assert result.seconds == pytest.approx(wanted["latency_s"], rel=1e-12)
    for device, (time, total) in result.memory.timelines().items():
        np.testing.assert_allclose(
            np.c_[time, total], wanted["live_memory_timeline_by_device"][str(device)], rtol=1e-12
        )


def test_inference(distir):
    wanted, shape = find(distir, "head-inference-L16-h1024-fp32"), (512, 1024)
    build = ProgramBuilder(4)
    value = build.input(shape, 0)
    weights = [build.input((1024, 1024), 0) for _ in range(16)]
    for weight in weights:
        (value,) = build.op("MatMul", (shape, (1024, 1024)), (0,), (value, weight), [(shape, 0)])
        (value,) = build.op("Relu", (shape,), (0,), (value,), [(shape, 0)])
    result = simulate(build.build(), CLUSTER, rule_set("head"))
    assert result.seconds == pytest.approx(wanted["latency_s"], rel=1e-12)
    assert (result.peak_bytes, result.program.num_ops) == (wanted["peak_memory_bytes"], wanted["num_ops"])


def test_trace_and_memory_of_the_tiny_step(distir):
    degrees = Degrees(pipeline=2, microbatches=2)
    step = mlp_step(Mlp.square(4, 4, 8), degrees, "head", StepOptions(gather_outputs=False))
    result = simulate(step.expand(Placement(degrees, first=1)), CLUSTER, rule_set("head"))
    wanted = distir["tiny_trace"]
    events = chrome_events(result.timeline(), DISTIR_NAMES)
    assert len(events) == len(wanted["trace"])
    for found, event in zip(events, wanted["trace"]):
        assert found == {
            **event,
            "ts": pytest.approx(event["ts"], rel=1e-12),
            "dur": pytest.approx(event["dur"], rel=1e-12),
        }
    for device, (time, total) in result.memory.timelines().items():
        np.testing.assert_allclose(
            np.c_[time, total], wanted["live_memory_timeline_by_device"][str(device)], rtol=1e-12
        )
    for device, seconds in device_seconds(result).items():
        assert seconds == pytest.approx(wanted["device_clock_s"][str(device)], rel=1e-12)


def test_simulated_column_of_the_measured_table(distir):
    table = distir["measured_hardware"]
    rules = RULES["march"]
    for row in table["rows"]:
        degrees = Degrees(data=row["world_size"])
        mlp = Mlp.square(row["layers"], row["hidden_dim"], row["batch"])
        cluster = Cluster.homogeneous(
            degrees.world + 1,
            Device(table["device_flops"], table["dram_bytes_per_s"]),
            Switch(table["bandwidth_gbps"] * GIGABIT),
        )
        result = simulate(mlp_step(mlp, degrees, rules).expand(Placement(degrees, first=1)), cluster, rule_set(rules))
        assert abs(1e3 * result.seconds - row["simulated_ms"]) <= 0.5 * table["simulated_ms_is_rounded_to"]


@pytest.mark.parametrize("rules,device", [("notebook", Device(1e14, 1.2e12)), ("head", Device(1.4e13, 9e11))])
def test_simulated_latency_of_the_scaling_programs(distir, rules, device):
    rows = [row for row in distir["simulator_scaling"] if row["rules"] == rules]
    assert rows
    for row in rows:
        step = mlp_step(
            Mlp.square(row["layers"], row["dim"], row["batch"]),
            rules=rules,
            options=StepOptions(optimizer=False),
        )
        result = simulate(
            step.expand(Placement(Degrees())), Cluster.homogeneous(1, device, Switch(1.0)), rule_set(rules)
        )
        assert result.seconds == pytest.approx(row["simulated_latency_s"], rel=1e-9)
        assert result.num_events == row["num_ops"]
