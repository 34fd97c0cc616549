"""Predictions compared with published runs: one test per row of published.json, and one per source for the order."""

import json
import statistics

import pytest

from mstrain.planner.published.predict import predict
from mstrain.planner.published.rows import read_rows
from tests.golden_option import golden, parametrize


def pytest_generate_tests(metafunc):
    rows = golden(metafunc.config, "published.json").get("rows", [])
    parametrize(metafunc, "number", list(range(len(rows))), lambda number, _: rows[number].get("name", number))
    sources = sorted({str(row.get("source")) for row in rows})
    parametrize(metafunc, "source", sources, lambda _, source: source)


@pytest.fixture(scope="module")
def predictions(request, tmp_path_factory):
    """A prediction per row, or the message of one that cannot be read."""
    path, found = tmp_path_factory.mktemp("rows") / "rows.json", []
    for row in golden(request.config, "published.json").get("rows", []):
        path.write_text(json.dumps({"rows": [row]}))
        try:
            found.append(predict(read_rows(str(path))[0]))
        except ValueError as error:
            found.append(str(error))
    return found


def readable(predictions) -> list:
    return [prediction for prediction in predictions if not isinstance(prediction, str)]


def test_row_is_predicted_within_15_percent(predictions, number):
    prediction = predictions[number]
    assert not isinstance(prediction, str), prediction
    assert abs(prediction.ratio - 1) < 0.15


def test_rows_of_a_source_keep_their_order(predictions, source):
    compared = [each.compared for each in readable(predictions) if each.row.source == source]
    by_prediction = [measured for _, _, measured in sorted(compared, key=lambda each: each[1])]
    assert by_prediction == sorted(by_prediction)


def test_half_of_the_rows_are_predicted_within_7_percent(predictions):
    assert statistics.median([abs(each.ratio - 1) for each in readable(predictions)] or [0]) < 0.07
