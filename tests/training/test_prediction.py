"""Predicted beside measured step times: beyond a fifth, the term that is off, as far as it can be told."""

import pytest

from mstrain.training.prediction import Measured, Prediction, compare

PREDICTION = Prediction({"products": 0.06, "communication": 0.04}, "a test")


@pytest.mark.parametrize("seconds", [0.085, 0.1, 0.12])
def test_a_step_as_predicted_is_one_line(seconds):
    (line,) = compare(PREDICTION, Measured(seconds, 0.0, seconds), emulated=True)
    assert f"predicted 100.0 ms a step, measured {1e3 * seconds:.1f}" in line


CASES = {
    "input": (Measured(0.2, 0.1, 0.2), "input: a step waits for it 100.0 ms"),
    "cores": (Measured(0.3, 0.0, 0.1), "the CPU cores. This process used them for 100.0 ms"),
    "cores of a busy machine": (Measured(1.5, 0.0, 0.13), "the CPU cores. This process used them for 130.0 ms a step"),
    "a term above the step": (
        Measured(0.05, 0.0, 0.05),
        "products, predicted to take longer than the whole measured step",
    ),
    "two terms": (Measured(0.02, 0.0, 0.02), "products and communication, predicted to take longer than"),
    "none": (Measured(0.3, 0.0, 0.3), "cannot be separated without a profile"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_term_that_is_off_is_named(case):
    measured, message = CASES[case]
    first, second = compare(PREDICTION, measured, emulated=True)
    assert "ratio" in first and second.startswith("The prediction differs by more than 20%") and message in second


def test_cores_are_shared_on_emulated_devices_alone():
    _, line = compare(PREDICTION, Measured(0.3, 0.0, 0.1), emulated=False)
    assert "without a profile" in line
