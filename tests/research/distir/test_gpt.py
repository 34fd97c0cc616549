"""Cuts of a GPT-2 stack: those that are impossible, and what faster links change."""

import pytest

from mstrain.simulator.cluster import Cluster, Device, Switch
from mstrain.simulator.placement import Degrees
from mstrain.simulator.simulate import simulate_step
from tests.research.distir.gpt import GptStack, gpt_step
from tests.simulator.everything import simulate_everything


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
    slow, fast = (simulate_step(step, Cluster.homogeneous(12, device, Switch(rate))).seconds for rate in (1e9, 1e11))
    assert 0 < fast < slow
    everything = simulate_everything(step, Cluster.homogeneous(12, device, Switch(1e9)))
    assert everything.seconds == pytest.approx(slow, rel=1e-12)
