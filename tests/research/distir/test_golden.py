"""The rule sets repeat the numbers of the original DistIR: one test per case of distir.json."""

import numpy as np

from research.distir.experiments import chrome_events
from research.distir.rules import DISTIR_NAMES
from tests.golden_option import differences, golden, parametrize
from tests.research.distir.cases import (
    figures,
    measured_row,
    scaling_row,
    simulations,
    tiny_step,
    unfiltered_operations,
)
from tests.simulator.measures import num_events


def pytest_generate_tests(metafunc):
    document = golden(metafunc.config, "distir.json")

    def name(number, case):
        return case.get("id", number)

    parametrize(metafunc, "case", document.get("cases", []), name)
    parametrize(metafunc, "scaling", document.get("simulator_scaling", []), name)
    table = document.get("measured_hardware", {})
    parametrize(metafunc, "measured", [{**table, **row} for row in table.get("rows", ())], name)
    parametrize(metafunc, "trace", [document[key] for key in ("tiny_trace",) if key in document], lambda *_: "tiny")


def test_case(case, request):
    tolerance = golden(request.config, "distir.json").get("tolerance_relative", 1e-6)
    expected = dict(case["expected"])
    if "num_ops_before_filter" in expected:
        assert unfiltered_operations(case) == expected.pop("num_ops_before_filter")
    for result, batch in simulations(case):
        assert not differences(figures(result, batch, expected), expected, tolerance)


def test_scaling_program(scaling):
    result = scaling_row(scaling)
    found = {"simulated_latency_s": result.seconds, "num_ops": num_events(result)}
    assert not differences(found, scaling, 1e-9)


def test_simulated_column_of_the_measured_table(measured):
    milliseconds = 1e3 * measured_row(measured, measured).seconds
    assert abs(milliseconds - measured["simulated_ms"]) <= 0.5 * measured["simulated_ms_is_rounded_to"]


def test_trace_and_memory_of_the_tiny_step(trace):
    result = tiny_step()
    found = figures(result, None, trace)
    assert not differences({**found, "trace": chrome_events(result.timeline(), DISTIR_NAMES)}, trace, 1e-9)
    assert all(np.diff(result.memory.timelines()[1][0]) >= 0)
