"""The GPT-2 cut gives the numbers of the original."""

import pytest

from mstrain.planning.cluster import GIGABIT, Cluster, Device, Switch
from mstrain.planning.placement import Degrees, Placement
from mstrain.planning.rules import DISTIR_NAMES
from mstrain.planning.simulator import simulate
from mstrain.planning.transform_gpt import GptStack, gpt_step


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
        for program in (
            step.expand(Placement(degrees, first=1)),
            step.representative(Placement(degrees, first=1)),
        ):
            result = simulate(program, cluster, "head")
            assert result.seconds == pytest.approx(wanted["latency_s"], rel=distir["tolerance_relative"])
            assert result.peak_bytes == wanted["peak_memory_bytes"]
            assert result.num_events == wanted["trace_events"] and program.num_ops == wanted["num_ops"]
            assert {
                DISTIR_NAMES.get(kind, kind): count for kind, count in program.op_counts().items()
            } == wanted["op_counts"]
            for device, seconds in result.device_seconds.items():
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
