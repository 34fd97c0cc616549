"""The corrected rule set: right units, groups and optimizer; communication that overlaps and competes; odd
degrees.
"""

import dataclasses

import numpy as np
import pytest

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.placement import Degrees
from mstrain.simulator.program import OpSpec
from mstrain.simulator.simulate import simulate, simulate_step
from mstrain.timeline import device_use, exposed_communication
from research.distir.grid import simulate_mlp
from research.distir.mlp import Mlp
from research.distir.rules import RULES, rule_set
from research.distir.transform_mlp import mlp_step
from tests.simulator.builder import ProgramBuilder
from tests.simulator.everything import simulate_everything
from tests.simulator.measures import communication_fraction, num_events, op_counts
from tests.simulator.networks import Pairs, Torus

CHIP = Device(1e14, 1e12, memory_bytes=8e10, launch_seconds=2e-6)
CORRECTED = RULES["corrected"]


def cluster_of(count: int, latency: float = 1e-6) -> Cluster:
    return Cluster.homogeneous(count, CHIP, Switch(25e9, latency))


def test_kernels_take_the_longer_of_memory_and_arithmetic():
    def cost(kind, *shapes):
        return CORRECTED.compute_seconds(OpSpec(kind, shapes, 2), CHIP) - CHIP.launch_seconds

    assert cost("MatMul", (4096, 4096), (4096, 4096)) == pytest.approx(2 * 4096**3 / 1e14)
    assert cost("MatMul", (8, 4096), (4096, 4096)) == pytest.approx(2 * (2 * 8 * 4096 + 4096**2) / 1e12)
    assert cost("MatMul", (6, 512, 64), (6, 64, 512)) == pytest.approx(
        max(2 * 6 * 512 * 64 * 512 / 1e14, 2 * 6 * (2 * 512 * 64 + 512**2) / 1e12)
    )
    assert cost("Relu", (1024, 1024)) == pytest.approx(2 * 2 * 1024**2 / 1e12)
    assert cost("ReluGrad", (1024, 1024)) == pytest.approx(3 * 2 * 1024**2 / 1e12)
    assert cost("Loss", (1024, 1024)) == pytest.approx(2 * 2 * 1024**2 / 1e12)
    assert cost("SGD", (1024, 1024), (512, 512)) == pytest.approx(3 * 2 * (1024**2 + 512**2) / 1e12)
    assert CORRECTED.compute_seconds(OpSpec("Identity", ((9, 9),), 2), CHIP) == 0.0


def test_one_gigabit_is_an_eighth_of_a_gigabyte():
    cluster = Cluster.homogeneous(2, CHIP, Switch(200 * GIGABIT))
    send = OpSpec("Send", ((1000, 1000),), 4)
    assert CORRECTED.communication_seconds(send, (0, 1), cluster) == pytest.approx(4e6 / 25e9)
    assert RULES["notebook"].communication_seconds(send, (0, 1), cluster) == pytest.approx(4e6 / 25e9 * 4 / 64)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="choose one of corrected notebook march head"):
        rule_set("tail")
    with pytest.raises(ValueError, match="no cost rule for operation 'Fft'; known: .*MatMul"):
        CORRECTED.compute_seconds(OpSpec("Fft", ((2, 2),), 4), CHIP)


def test_gradients_are_summed_over_replicas_and_once_per_weight():
    degrees = Degrees(2, 4)
    step = mlp_step(Mlp.square(4, 64, 64), degrees, "corrected")
    result = simulate_everything(step, cluster_of(8))
    program = result.program
    gradient_groups = [
        program.groups[group]
        for spec, group in zip(program.spec, program.group)
        if program.specs[spec].kind == "AllReduce" and len(program.groups[group]) == 2
    ]
    assert sorted(set(map(tuple, gradient_groups))) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert len(gradient_groups) == 4 * (4 + 1)  # four weights and the loss, on four ranks
    assert step.degrees == degrees


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(3),
        Degrees(1, 3),
        Degrees(1, 1, 3, 5),
        Degrees(3, 3, 3, 2),
        Degrees(2, 6, 1),
        Degrees(5, 1, 2, 3),
        Degrees(1, 2, 2, 4, interleave=2),
    ],
)
@pytest.mark.parametrize("rules", ["corrected", "head"])
def test_one_rank_represents_all(degrees, rules):
    mlp = Mlp(12, 96, 72, 144, 90 * 4, 2)
    cluster = cluster_of(degrees.world + 1)
    rules = dataclasses.replace(RULES[rules], rings=True, first=0)  # rings know groups of any size
    one, all_ = (run(mlp_step(mlp, degrees, rules), cluster, rules) for run in (simulate_step, simulate_everything))
    assert len(one.program.devices) == degrees.pipeline and len(all_.program.devices) == degrees.world
    assert one.seconds == pytest.approx(all_.seconds, rel=1e-12)
    assert (num_events(one), one.program.num_ops) == (num_events(all_), all_.program.num_ops)
    assert op_counts(one.program) == op_counts(all_.program)
    assert communication_fraction(one) == pytest.approx(communication_fraction(all_), rel=1e-9)
    assert one.peak_bytes == all_.peak_bytes


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("shape", [(4, 3, 2), (2, 4, 3), (4, 1, 6), (2, 2, 1)])
def test_one_rank_represents_all_on_a_torus(shape, interleave):
    mlp = Mlp(12, 96, 72, 144, 48, 2)
    degrees = Degrees(pipeline=shape[0], data=shape[1], tensor=shape[2], microbatches=4, interleave=interleave)
    cluster = Cluster.homogeneous(degrees.world, CHIP, Torus(shape, 1e9, 1e-6))
    one, all_ = (run(mlp_step(mlp, degrees), cluster) for run in (simulate_step, simulate_everything))
    assert len(one.program.devices) < len(all_.program.devices)
    assert one.seconds == pytest.approx(all_.seconds, rel=1e-12)
    assert one.peak_bytes == all_.peak_bytes
    exposed = exposed_communication(all_.timeline())
    for device, seconds in exposed_communication(one.timeline()).items():
        assert seconds == pytest.approx(exposed[device], rel=1e-9)


def test_gradient_sums_hide_behind_the_backward_pass():
    mlp, degrees = Mlp.square(8, 2048, 4096, 2), Degrees(data=4)
    stopping = dataclasses.replace(CORRECTED, link_lanes=False, gradients_early=False)
    beside, between = (simulate_mlp(mlp, degrees, cluster_of(4), rules) for rules in (CORRECTED, stopping))
    exposed = []
    for result in (beside, between):
        timeline = result.timeline()
        use = device_use(timeline)[0]
        exposed.append(use.exposed)
        assert use.compute + use.exposed == pytest.approx(result.seconds)
    assert exposed[0] < 0.8 * exposed[1]


def test_messages_do_not_stop_their_devices_but_share_links():
    def send_and_work(destinations, network):
        build, shape = ProgramBuilder(2), (4096, 4096)
        values = [build.input(shape, 0) for _ in range(4)]
        for value, destination in zip(values, destinations):
            build.op("Send", (shape,), (0, destination), (value,), [(shape, destination)])
        build.op("MatMul", (shape, shape), (0,), values[:2], [(shape, 0)])
        return simulate(build.build(), Cluster.homogeneous(4, CHIP, network))

    message = 2 * 4096**2 / 25e9
    work = CHIP.launch_seconds + 2 * 4096**3 / 1e14
    one, two = (send_and_work(where, Switch(25e9)) for where in ((1,), (1, 2)))
    assert one.seconds == pytest.approx(max(message, work)) and one.start[-1] == 0.0
    assert two.seconds == pytest.approx(2 * message)
    assert send_and_work((1, 2), Torus((2, 2), 25e9)).seconds == pytest.approx(max(message, work))
    # On a ring of four, the way to device 2 leads over the wire to device 1.
    assert send_and_work((1, 2), Torus((4,), 25e9)).seconds == pytest.approx(2 * message)


def test_a_slow_link_slows_only_plans_that_use_it():
    mlp, degrees = Mlp.square(8, 512, 512), Degrees(pipeline=4, microbatches=8)
    bandwidths = np.full((4, 4), 25e9)
    fast = simulate_mlp(mlp, degrees, Cluster.homogeneous(4, CHIP, Pairs(bandwidths)))
    unused, used = bandwidths.copy(), bandwidths.copy()
    unused[0, 3] = unused[3, 0] = 1e9
    used[1, 2] = used[2, 1] = 1e9
    assert simulate_mlp(mlp, degrees, Cluster.homogeneous(4, CHIP, Pairs(unused))).seconds == fast.seconds
    assert simulate_mlp(mlp, degrees, Cluster.homogeneous(4, CHIP, Pairs(used))).seconds > 1.5 * fast.seconds


def test_a_slow_device_slows_the_step_and_faster_links_never_do():
    mlp, degrees = Mlp.square(8, 512, 1024), Degrees(pipeline=2, microbatches=4, data=2)
    slow = dataclasses.replace(CHIP, flops=CHIP.flops / 50)
    even = simulate_mlp(mlp, degrees, cluster_of(4))
    mixed = simulate_everything(mlp_step(mlp, degrees), Cluster((CHIP, CHIP, CHIP, slow), Switch(25e9, 1e-6)))
    assert mixed.seconds > even.seconds
    seconds = [
        simulate_mlp(mlp, degrees, Cluster.homogeneous(4, CHIP, Switch(rate))).seconds
        for rate in (1e9, 1e10, 1e11, 1e12)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_schedules_trade_memory_for_time():
    mlp = Mlp.square(16, 1024, 4096, 2)

    def run(schedule, interleave=1):
        rules = dataclasses.replace(CORRECTED, schedule=schedule)
        return simulate_mlp(mlp, Degrees(1, 1, 4, 16, interleave), cluster_of(4), rules)

    gpipe, textbook, eager, interleaved = run("gpipe"), run("1f1b"), run("distir"), run("interleaved", 2)
    assert textbook.peak_bytes < eager.peak_bytes < gpipe.peak_bytes
    assert interleaved.seconds < textbook.seconds
    assert textbook.peak_bytes < interleaved.peak_bytes


@pytest.mark.parametrize(
    "mlp,degrees,rules,message",
    [
        (
            Mlp.square(4, 64, 10),
            Degrees(data=3),
            "corrected",
            "batch 10 does not split .* use a multiple of 3",
        ),
        (Mlp.square(5, 64, 8), Degrees(tensor=2), "corrected", "use 6 layers or tensor degree 1"),
        (Mlp.square(4, 64, 8), Degrees(tensor=3), "corrected", "64 wide, which 3 tensor ranks do not divide"),
        (Mlp.square(4, 64, 8), Degrees(pipeline=5), "corrected", "lower the pipeline degree"),
        (Mlp.square(4, 64, 8), Degrees(pipeline=3), "head", "use rules=corrected"),
        (Mlp.square(4, 66, 9), Degrees(data=3), "notebook", "power-of-two degrees or rules=corrected"),
        (Mlp.square(4, 64, 8), Degrees(interleave=2), "corrected", "set interleave=1"),
        (Mlp.square(4, 64, 8), Degrees(data=0), "corrected", "at least 1"),
        (Mlp.square(4, 64, 64), Degrees(data=16), "corrected", "the cluster has 9; lower the degrees"),
    ],
)
def test_plans_that_do_not_fit_say_what_to_change(mlp, degrees, rules, message):
    with pytest.raises(ValueError, match=message):
        simulate_mlp(mlp, degrees, cluster_of(9), rules)


def test_communication_counts_devices_not_links():
    build, shape = ProgramBuilder(4), (2048, 2048)
    values = [build.input(shape, device) for device in range(4)]
    build.op("AllReduce", (shape,), range(4), values, [(shape, device) for device in range(4)])
    build.op("MatMul", (shape, shape), (0,), (values[0], values[0]), [(shape, 0)])
    for network in (Switch(25e9), Torus((4,), 12.5e9)):
        result = simulate(build.build(), Cluster.homogeneous(4, CHIP, network))
        ring, work = result.end[0], result.end[1]
        assert ring == pytest.approx(1.5 * 4 * 2048**2 / 25e9)
        assert communication_fraction(result) == pytest.approx(4 * ring / (4 * ring + work))
        use = device_use(result.timeline())
        assert [each.compute for each in use.values()] == pytest.approx([work, 0, 0, 0])


def test_a_message_shows_at_both_ends_on_every_network():
    mlp, degrees = Mlp.square(4, 256, 64), Degrees(pipeline=2, microbatches=2)
    for network in (Switch(1e8), Torus((2,), 1e8), Pairs(np.full((2, 2), 1e8))):
        result = simulate_mlp(mlp, degrees, Cluster.homogeneous(2, CHIP, network))
        exposed = exposed_communication(result.timeline())
        # Links are so slow that whoever does not compute waits for a message, bar the start and the end.
        assert min(exposed.values()) > 0.5 * result.seconds


def test_simulated_timeline_names_units_and_work():
    result = simulate_mlp(Mlp.square(4, 256, 64), Degrees(pipeline=2, microbatches=2), cluster_of(2))
    timeline = result.timeline()
    assert timeline.seconds == pytest.approx(result.seconds)
    assert {lane.thread for lane in timeline.lanes} == {"compute", "link out", "link in"}
    matmul = timeline.names.index("MatMul")
    first = int(np.flatnonzero(timeline.name == matmul)[0])
    assert timeline.args["flops"][first] == 2 * 32 * 256 * 256 and timeline.args["shape"][first] == "32x256 256x256"
    assert timeline.args["microbatch"][first] == 0
    assert {counter.device for counter in timeline.counters} == {0, 1}
    assert max(counter.value.max() for counter in timeline.counters) == result.peak_bytes
    sends = timeline.args["flow"][timeline.args["flow"] >= 0]
    assert len(sends) == 2 * len(set(sends.tolist()))  # each message has an end on either device
