"""Golden cases of distir.json: their programs, and results under the names of the file."""

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.placement import Degrees, Placement
from mstrain.simulator.program import OpSpec
from mstrain.simulator.simulate import Simulation, simulate, simulate_step
from research.distir.mlp import Mlp
from research.distir.rules import DISTIR_NAMES, RULES, Original, RuleSet, rule_set
from research.distir.transform_mlp import mlp_step
from tests.research.distir.gpt import GptStack, gpt_step
from tests.research.distir.unloaded import unloaded_step
from tests.simulator.builder import ProgramBuilder
from tests.simulator.everything import expand, simulate_everything
from tests.simulator.measures import communication_fraction, device_seconds, num_events, op_counts

ELEMENT_BYTES = {"fp16": 2, "fp32": 4}
ROOT = {"notebook": Device(1e14, 1.2e12), "march": Device(1e14, 1.2e12), "head": Device(1.4e13, 9e11)}
W = (512, 512)


@dataclasses.dataclass(frozen=True)
class Fitted(Original):
    """DistIR's all-reduce of measured devices: a * gigabits-worth + b * members + c seconds, by number of members."""

    fit: Mapping[int, tuple[float, float, float]] = dataclasses.field(default_factory=dict)

    def communication_seconds(self, spec: OpSpec, members: Sequence[int], cluster: Cluster):
        size = len(members)
        if spec.kind not in ("AllReduce", "AllGather") or size not in self.fit:
            return super().communication_seconds(spec, members, cluster)
        slope, per_member, constant = self.fit[size]
        nbytes = (
            prod(spec.shapes[0]) * spec.element_bytes * (spec.element_bytes if spec.kind in self.double_counted else 1)
        )
        return slope * nbytes / self.gigabit_bytes + per_member * size + constant


def rules_of(case: dict) -> RuleSet:
    rules, given = rule_set(case["rules"]), case["inputs"]
    if "allreduce_parameters" in given:
        rules = Fitted(**vars(rules), fit={int(size): tuple(v) for size, v in given["allreduce_parameters"].items()})
    if "layers" not in given:
        return rules
    updates = rules.optimizer if given.get("optimizer", False) else "none"
    return dataclasses.replace(rules, optimizer=updates, gather_outputs=not given.get("skip_allgathers", True))


def degrees_of(given: dict) -> Degrees:
    return Degrees(given["dp"], given["hp"], given["pp"], given["microbatches"])


def device_of(given: dict) -> Device:
    return Device(given["device_flops"], given["dram_bytes_per_s"])


def plan_of_case(case: dict):
    """(step, placement, cluster, rules, batch) of one golden case of a perceptron."""
    given, rules, degrees = case["inputs"], rules_of(case), degrees_of(case["inputs"])
    mlp = Mlp(
        *(given[name] for name in ("layers", "input_dim", "hidden_dim", "output_dim", "batch")),
        ELEMENT_BYTES[given.get("dtype", "fp32")],
    )
    # Device 0 keeps the default hardware; untransformed programs run on it.
    cluster = Cluster(
        (ROOT[case["rules"]],) + (device_of(given),) * degrees.world, Switch(given["bandwidth_gbps"] * GIGABIT)
    )
    placement = Placement(degrees, rules.axis_order, 1 if given["transformed"] else 0)
    make = mlp_step if given.get("filtered", True) else unloaded_step
    return make(mlp, degrees, rules), placement, cluster, rules, mlp.batch


def simulations(case: dict) -> list[tuple[Simulation, int | None]]:
    """Simulations of a case, each with its batch: of all devices and, if devices are equal, of one of each kind."""
    given, rules = case["inputs"], rules_of(case)
    kind = given["experiment"]
    if kind in PROGRAMS:
        cluster = Cluster.homogeneous(2, device_of(given), Switch(given.get("bandwidth_gbps", 25) * GIGABIT))
        return [(simulate(PROGRAMS[kind](given), cluster, rules), given.get("batch"))]
    if "n_layer" in given:
        step = gpt_step(GptStack(given["n_layer"], given["d_embd"], given["rows"]), degrees_of(given))
        network = Switch(given["bandwidth_gbps"] * GIGABIT)
        cluster = Cluster.homogeneous(step.degrees.world + 1, device_of(given), network)
        return [(run(step, cluster, rules), given["rows"]) for run in (simulate_step, simulate_everything)]
    if "layers" not in given:
        raise ValueError(f"experiment {kind!r}: known are perceptrons, GPT-like stacks and {', '.join(PROGRAMS)}")
    step, placement, cluster, rules, batch = plan_of_case(case)
    programs = [expand(step, placement)] + ([step.program(placement)] if not step.groups else [])
    return [(simulate(program, cluster, rules), batch) for program in programs]


def unfiltered_operations(case: dict) -> int:
    """Operations of a perceptron's step with those that load its inputs."""
    step, placement, *_ = plan_of_case({**case, "inputs": {**case["inputs"], "filtered": False}})
    return expand(step, placement).num_ops


def figures(result: Simulation, batch: int | None, wanted: dict) -> dict:
    """The figures of a simulation under the names of the golden file; per device those that `wanted` names."""
    counts = {DISTIR_NAMES.get(kind, kind): count for kind, count in op_counts(result.program).items()}
    seconds, peaks = device_seconds(result), result.memory.peak_bytes
    lines = result.memory.timelines() if "live_memory_timeline_by_device" in wanted else {}

    whole = len(seconds) >= len(wanted.get("device_clock_s", ()))  # else one of each kind of device
    return {
        "latency_s": result.seconds,
        **({"throughput": batch / result.seconds} if batch else {}),
        "num_ops": result.program.num_ops,
        "trace_events": num_events(result),
        "comm_fraction": communication_fraction(result),
        "op_counts": counts,
        "min_device_clock_s": min(seconds.values()),
        **({"device_clock_s": {str(device): clock for device, clock in seconds.items()}} if whole else {}),
        "peak_memory_bytes": result.peak_bytes,
        "min_over_devices_of_peak_memory_bytes": min(peaks.values()),
        "peak_memory_bytes_by_device": {str(device): peak for device, peak in peaks.items()},
        "live_memory_timeline_by_device": {
            str(device): np.c_[time, total].tolist() for device, (time, total) in lines.items()
        },
    }


def inference(given: dict):
    """Products and Relus on one device."""
    build = ProgramBuilder(ELEMENT_BYTES[given.get("dtype", "fp32")])
    dims = [given["input_dim"], *[given["hidden_dim"]] * (given["layers"] - 1), given["output_dim"]]
    shapes = list(zip(dims, dims[1:]))
    rows = given["batch"]
    value = build.input((rows, dims[0]), 0)
    weights = [build.input(shape, 0) for shape in shapes]
    for weight, (inner, outer) in zip(weights, shapes):
        (value,) = build.op("MatMul", ((rows, inner), (inner, outer)), (0,), (value, weight), [((rows, outer), 0)])
        (value,) = build.op("Relu", ((rows, outer),), (0,), (value,), [((rows, outer), 0)])
    return build.build()


def checkpointing(given: dict):
    """Two layers on one device, the first activation kept or, with `optimize`, recomputed."""
    build = ProgramBuilder(2)
    build.input((1,), 0, nbytes=4)
    w1, w2, x, y = (build.input(W, 0) for _ in range(4))

    def layer(left, right):
        return build.op("MatMul", (W, W), (0,), (left, right), [(W, 0)])[0]

    a = layer(x, w1)
    p = layer(a, w2)
    (g,) = build.op("LossGrad", (W,), (0,), (p, y), [(W, 0)])
    a = layer(x, w1) if given["optimize"] else a
    da, dw2 = build.op("MatMulGrad", (W, W), (0,), (a, w2, g), [(W, 0)] * 2)
    _, dw1 = build.op("MatMulGrad", (W, W), (0,), (x, w1, da), [(W, 0)] * 2)
    build.op("SGD", (W, W), (0,), (w1, w2, dw1, dw2))
    return build.build()


def sharded_weights(given: dict):
    """Two layers on two devices: weights replicated, or with `optimize` one layer's on each and sent before use."""
    build, rows, sharded = ProgramBuilder(2), (256, 512), given["optimize"]
    for device in (0, 1):
        build.input((1,), device, nbytes=4)
    owned = [(1, 0), (2, 1)]
    w = {key: build.input(W, key[1]) for key in (owned if sharded else [(1, 0), (1, 1), (2, 0), (2, 1)])}
    x, y = [build.input(rows, d) for d in (0, 1)], [build.input(rows, d) for d in (0, 1)]

    def weight(layer, device):
        if (layer, device) in owned or not sharded:
            return w[layer, device]
        return build.op("Send", (W,), (1 - device, device), (w[layer, 1 - device],), [(W, device)])[0]

    def each(kind, shapes, inputs, outputs=1):
        return [build.op(kind, shapes, (d,), inputs(d), [((rows, W)[n], d) for n in range(outputs)]) for d in (0, 1)]

    first_weights = [weight(1, d) for d in (0, 1)]  # sent before either product, the others just before theirs
    a = each("MatMul", (rows, W), lambda d: (x[d], first_weights[d]))
    p = each("MatMul", (rows, W), lambda d: (a[d][0], weight(2, d)))
    g = each("LossGrad", (rows,), lambda d: (p[d][0], y[d]))
    second = each("MatMulGrad", (rows, W), lambda d: (a[d][0], weight(2, d), g[d][0]), 2)
    first = each("MatMulGrad", (rows, W), lambda d: (x[d], weight(1, d), second[d][0]), 2)
    grads = [[layer[d][1] for d in (0, 1)] for layer in (first, second)]
    if sharded:
        sums = [build.op("Reduce", (W,), (1 - d, d), (grad[1 - d], grad[d]), [(W, d)]) for d, grad in enumerate(grads)]
    else:
        sums = [build.op("AllReduce", (W,), (0, 1), grad, [(W, 0), (W, 1)]) for grad in grads]
    build.op("SGD", (W,) * len(w), (0, 1), (*w.values(), *sums[0], *sums[1]))
    return build.build()


PROGRAMS = {
    "mlp_inference": inference,
    "memory_gradient_checkpointing": checkpointing,
    "memory_zero": sharded_weights,
}


def tiny_step() -> Simulation:
    """Four layers of 4x4 over two stages."""
    rules = dataclasses.replace(rule_set("head"), gather_outputs=False)
    step = mlp_step(Mlp.square(4, 4, 8), Degrees(pipeline=2, microbatches=2), rules)
    cluster = Cluster.homogeneous(3, Device(1.4e13, 9e11), Switch(25 * GIGABIT))
    return simulate(expand(step, Placement(step.degrees, first=1)), cluster, rules)


def measured_row(table: dict, row: dict) -> Simulation:
    """A row of the table of measured hardware."""
    degrees, rules = Degrees(data=row["world_size"]), RULES["march"]
    mlp = Mlp.square(row["layers"], row["hidden_dim"], row["batch"])
    network = Switch(table["bandwidth_gbps"] * GIGABIT)
    cluster = Cluster.homogeneous(degrees.world + 1, device_of(table), network)
    return simulate(expand(mlp_step(mlp, degrees, rules), Placement(degrees, first=1)), cluster, rules)


def scaling_row(row: dict) -> Simulation:
    """A sequential program of the simulator's own timing."""
    bytes_of = ELEMENT_BYTES[row.get("dtype", "fp32")]
    shape = Mlp(row["layers"], *[row["dim"]] * 3, row["batch"], bytes_of)
    step = mlp_step(shape, rules=dataclasses.replace(rule_set(row["rules"]), optimizer="none"))
    cluster = Cluster.homogeneous(1, ROOT[row["rules"]], Switch(1.0))
    return simulate(expand(step, Placement(Degrees())), cluster, rule_set(row["rules"]))
