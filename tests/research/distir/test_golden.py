"""The rule sets `notebook` and `head` give the numbers of the original DistIR, per device and per
representative.
"""

import pytest

from mstrain.simulator.simulate import simulate
from research.distir.rules import DISTIR_NAMES
from tests.simulator.measures import device_seconds, op_counts

EXPERIMENTS = {
    "notebook": {
        "sequential": 10,
        "grid": 102,
        "grid_bw25": 9,
        "isolated_dp": 21,
        "isolated_hp": 15,
        "isolated_pp": 14,
        "odd_stage": 4,
        "published_grid_csv": 60,
    },
    "head": {
        "head_mlp_training": 30,
        "head_notebook_hw": 9,
        "head_mlp_allgather": 2,
        "head_mlp_rect": 2,
        "head_mlp_calibrated_allreduce": 2,
        "head_tiny": 1,
        "head_odd_stage": 5,
        "grid_search_csv": 11,
    },
}


def figures(result, batch: int) -> dict:
    """The figures of a simulation under the names of the golden file."""
    return {
        "latency_s": result.seconds,
        "throughput": batch / result.seconds,
        "num_ops": result.program.num_ops,
        "trace_events": result.num_events,
        "comm_fraction": result.communication_fraction,
        "op_counts": {
            DISTIR_NAMES.get(kind, kind): count for kind, count in op_counts(result.program).items()
        },
        "min_device_clock_s": min(device_seconds(result).values()),
        "peak_memory_bytes": result.peak_bytes,
        "min_over_devices_of_peak_memory_bytes": min(result.memory.peak_bytes.values()),
    }


def differences(found: dict, expected: dict, tolerance: float) -> list[str]:
    def agree(value, wanted):
        return (
            value == pytest.approx(wanted, rel=tolerance, abs=0)
            if isinstance(wanted, float)
            else value == wanted
        )

    return [
        f"{key}: {found[key]} instead of {wanted}"
        for key, wanted in expected.items()
        if key in found and not agree(found[key], wanted)
    ]


@pytest.mark.parametrize(
    "rules,experiment", [(rules, name) for rules in EXPERIMENTS for name in EXPERIMENTS[rules]]
)
def test_every_golden_case(distir, golden_plan, rules, experiment):
    cases = [
        case
        for case in distir["cases"]
        if case["rules"] == rules and case["inputs"]["experiment"] == experiment
    ]
    assert len(cases) == EXPERIMENTS[rules][experiment]
    wrong = []
    for case in cases:
        step, placement, cluster, the_rules, batch = golden_plan(case)
        programs = [step.expand(placement)] + ([step.representative(placement)] if step.alike else [])
        for program in programs:
            found = figures(simulate(program, cluster, the_rules), batch)
            wrong += [
                f"{case['id']} {text}"
                for text in differences(found, case["expected"], distir["tolerance_relative"])
            ]
    assert not wrong


def test_operations_that_load_the_inputs_are_counted_as_in_the_original(distir, golden_plan):
    cases = [case for case in distir["cases"] if "num_ops_before_filter" in case["expected"]]
    assert len(cases) > 100
    for case in cases:
        step, placement, *_ = golden_plan({**case, "inputs": {**case["inputs"], "filtered": False}})
        assert step.expand(placement).num_ops == case["expected"]["num_ops_before_filter"], case["id"]


def test_golden_file_holds_nothing_untested(distir):
    elsewhere = {"mlp_inference", "memory_gradient_checkpointing", "memory_zero", "gptlike_inference"}
    names = {(case["rules"], case["inputs"]["experiment"]) for case in distir["cases"]}
    assert names == {(rules, name) for rules in EXPERIMENTS for name in EXPERIMENTS[rules]} | {
        ("head", name) for name in elsewhere
    }
