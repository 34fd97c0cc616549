"""The table, the picture and the dumps say what the tuning found."""

import csv
import io
import json

import pytest
from rich.console import Console

from mstrain.parallel.tune import tune
from mstrain.planner.tuning_report import explain, plot, to_csv, to_json
from tests.planner.products.blocks import GPT3


@pytest.fixture(scope="module")
def tuning(simulator):
    return tune(GPT3, 128 * 2048, 256, simulator)


def test_table_shows_the_winner_first_and_why_others_lost(tuning):
    console = Console(width=200, file=io.StringIO())
    console.print(explain(tuning, limit=3))
    text = console.file.getvalue()
    lines = [line for line in text.splitlines() if "os ls os ls" in line]
    assert "32x8" in lines[0] and "best" in lines[0] and f"{tuning.best.seconds * 1e3:.3f}" in lines[0]
    assert "64x4" in lines[1] and "row traffic 2.0x" in lines[1]
    assert "tpu_v4_simulator" in text and "8x32" not in text


def test_json_holds_the_result_and_every_trial(tuning):
    data = json.loads(to_json(tuning))
    assert data["mesh"] == [32, 8] and data["seconds"] == tuning.best.seconds
    assert data["exposed"] == pytest.approx(data["seconds"] - data["compute"])
    assert len(data["candidates"]) == len(tuning.candidates)
    for projection in data["projections"]:
        best = min(projection["trials"], key=lambda trial: trial["seconds"])
        assert (best["slices"], best["why"]) == (projection["slices"], "")
        assert sum(trial["why"] == "" for trial in projection["trials"]) == 1


def test_csv_has_a_line_per_candidate(tuning):
    rows = list(csv.DictReader(io.StringIO(to_csv(tuning))))
    assert [(int(r["rows"]), int(r["cols"])) for r in rows] == [(c.rows, c.cols) for c in tuning.candidates]
    assert float(rows[0]["exposed"]) == tuning.best.exposed and rows[1]["why"] == "row traffic 2.0x"


def test_picture_is_written(tuning, tmp_path):
    plot(tuning, tmp_path / "shapes.png")
    assert (tmp_path / "shapes.png").read_bytes().startswith(b"\x89PNG")
