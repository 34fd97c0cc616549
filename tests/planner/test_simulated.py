"""The simulated step of a plan beside its cost model: what crosses all stages, and what compiled steps hide."""

import pytest

from mstrain.planner.simulated import simulate_plan
from tests.planner.plans import pod_plan
from tests.planner.test_pod import PLANS, costed, without_lockstep


def test_stages_in_lockstep_send_to_all_what_the_cost_model_charges():
    """The last stage's activations and the first one's gradient of every microbatch; nothing without lockstep."""

    def seconds(simulation) -> float:
        found = [simulation.program.labels[label] == ("to all stages",) for label in simulation.program.label]
        return float((simulation.end - simulation.start)[found].sum())

    request, plan = costed(PLANS["meshslice pipelined"])
    assert plan.step.broadcasts > 0
    simulated = simulate_plan(request, plan).result
    assert seconds(simulated) == pytest.approx(plan.plan.microbatches * plan.step.broadcasts, rel=1e-6)
    assert seconds(simulate_plan(*without_lockstep(plan.plan)).result) == 0


def test_the_simulator_hides_what_compiled_steps_hide():
    """Of FSDP on v5p nearly all gathers, which the order of a product's operations does not hide."""
    stated = pod_plan(1, "fsdp", 4, 4, 2, 4, "none", schedule="interleaved")
    request, plan = costed(stated, cluster="v5p-64")
    assert simulate_plan(request, plan).result.seconds == pytest.approx(plan.scheduled_seconds, rel=0.1)
