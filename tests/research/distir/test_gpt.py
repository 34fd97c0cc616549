"""The GPT-2 cut gives the numbers of the original."""

import pytest

from mstrain.simulator.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.simulator.placement import Degrees
from research.distir.grid import simulate_step
from research.distir.rules import DISTIR_NAMES, rule_set
from research.distir.transform_gpt import GptStack, gpt_step
from tests.simulator.measures import device_seconds, op_counts


def test_gpt_like_inference(distir):
    cases = [case for case in distir["cases"] if case["inputs"]["experiment"] == "gptlike_inference"]
    assert len(cases) == 4
    for case in cases:
        given, wanted = case["inputs"], case["expected"]
        degrees = Degrees(given["dp"], given["hp"], given["pp"], given["microbatches"])
        cluster = Cluster.homogeneous(
            degrees.world + 1,
            Device(given["device_flops"], given["dram_bytes_per_s"]),
            Switch(given["bandwidth_gbps"] * GIGABIT),
        )
        step = gpt_step(GptStack(given["n_layer"], given["d_embd"], given["rows"]), degrees)
        for everything in (False, True):
            result = simulate_step(step, cluster, rule_set("head"), everything)
            program = result.program
            assert result.seconds == pytest.approx(wanted["latency_s"], rel=distir["tolerance_relative"])
            assert result.peak_bytes == wanted["peak_memory_bytes"]
            assert result.num_events == wanted["trace_events"] and program.num_ops == wanted["num_ops"]
            assert {
                DISTIR_NAMES.get(kind, kind): count for kind, count in op_counts(program).items()
            } == wanted["op_counts"]
            for device, seconds in device_seconds(result).items():
                assert seconds == pytest.approx(wanted["device_clock_s"][str(device)], rel=1e-6)


@pytest.mark.parametrize(
    "degrees,message",
    [
        (Degrees(data=3), "multiple of 3"),
        (Degrees(tensor=5), "tensor degree 5"),
        (Degrees(pipeline=4), "lower the pipeline degree"),
        (Degrees(pipeline=2, interleave=2), "interleave=1"),
    ],
)
def test_impossible_cuts_say_what_to_change(degrees, message):
    with pytest.raises(ValueError, match=message):
        gpt_step(GptStack(2, 64, 64), degrees)


def test_corrected_rules_run_the_same_stack_faster_on_faster_links():
    degrees = Degrees(2, 2, 3, 4)
    step = gpt_step(GptStack(5, 1024, 4096), degrees)
    device = Device(1e14, 1e12)
    slow, fast = (
        simulate_step(step, Cluster.homogeneous(12, device, Switch(rate))).seconds for rate in (1e9, 1e11)
    )
    assert 0 < fast < slow
    everything = simulate_step(step, Cluster.homogeneous(12, device, Switch(1e9)), everything=True)
    assert everything.seconds == pytest.approx(slow, rel=1e-12)
