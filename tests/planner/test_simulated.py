"""The simulated step of a plan compared with its cost model: broadcasts to all stages, and hidden collectives."""

import dataclasses

import pytest

from mstrain.models.zoo import load_preset
from mstrain.planner.simulated import simulate_plan
from tests.planner.plans import ask, cost, pod_plan
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


@pytest.mark.parametrize("model, layers, cluster, replicas, expert", [
    ("mixtral_8x7b", 4, "v5p-256", 128, 1), ("mixtral_8x7b", 4, "v5p-256", 128, 8),
    ("deepseek_v3", 5, "v5p-1024", 512, 64),
])  # fmt: skip
def test_experts_are_gathered_over_their_copies_and_wait_for_their_tokens(model, layers, cluster, replicas, expert):
    """Each of the terms is larger than the tolerance: gathers over all replicas of what 64 of them divide, or steps
    without the exchange of tokens and the copies of gathered weights.
    """
    kind = dataclasses.replace(load_preset(model), layers=layers)
    request = ask(kind, cluster=cluster, batch=2 * replicas, seq=4096)
    plan = cost(request, pod_plan(replicas, "fsdp", 1, 1, 1, 1, "full", shard="parameters", expert=expert))
    simulated = simulate_plan(request, plan).result
    assert simulated.seconds == pytest.approx(plan.scheduled_seconds, rel=0.04)
    waits = [("mlp" in str(label) and "wait" in label) for label in simulated.program.labels]
    waited = float((simulated.end - simulated.start)[[waits[label] for label in simulated.program.label]].sum())
    assert waited > plan.terms.tensor_exposed and (plan.terms.tensor_exposed > 0) == (expert > 1)
