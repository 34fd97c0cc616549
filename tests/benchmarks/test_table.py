"""A table says what it is; its files hold what it shows."""

import csv
import dataclasses
import io

import pytest
from rich.console import Console

from mstrain.benchmarks.table import Report, Row, from_json, to_csv, to_json, to_table, write

GOOD = Row("tiny", "2x4", "meshslice", "step", "os ls os ls", 8, 0.5, 2048.0, 3e12, 0.25, 0.1, 2**31)
BAD = Row("tiny", "2x4", "cannon", "step", batch=8, problem="cannon needs a square mesh")
UNKNOWN = dataclasses.replace(GOOD, algorithm="wang", mfu=None, exposed=None, low=0.4, high=0.6, unknown="HBM")


def report(kind="predicted", rows=(GOOD, BAD, UNKNOWN), peak=459e12):
    return Report(kind, f"{kind.capitalize()} for a test", "step", "bfloat16", peak, list(rows))


def shown(report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(to_table(report))
    return " ".join(console.export_text().split())


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_the_title_says_measured_or_predicted(kind):
    text = shown(report(kind))
    assert text.startswith(f"{kind.capitalize()} for a test")
    assert ("exposed" in text) == (kind == "predicted")
    assert ("HBM" in text) == (kind == "predicted")


def test_a_row_has_its_numbers_and_a_failed_one_its_reason():
    text = shown(report())
    assert "500.00" in text and "2,048" in text and "25.0%" in text and "20.0%" in text and "2.00 GiB" in text
    assert "cannon on 2x4 has no result: cannon needs a square mesh" in text
    assert "MFU = model FLOPs" in text and "459 TFLOP/s" in text


def test_an_unknown_peak_is_said():
    assert "unknown, so MFU is n/a" in shown(report(peak=None, rows=[UNKNOWN, BAD]))


def test_json_comes_back_equal():
    assert from_json(to_json(report())) == report()


def test_csv_comes_back_equal():
    rows = list(csv.DictReader(io.StringIO(to_csv(report("measured")))))
    assert {row.pop("kind") for row in rows} == {"measured"}
    for text, row in zip(rows, (GOOD, BAD, UNKNOWN), strict=True):
        values = {key: "" if value is None else str(value) for key, value in dataclasses.asdict(row).items()}
        assert text == values


def test_files_are_written_even_when_nothing_has_a_result(tmp_path):
    for rows in ([GOOD, BAD], [BAD]):
        paths = write(report(rows=rows), tmp_path / "run")
        assert [path.name for path in paths] == ["benchmark.csv", "benchmark.json", "benchmark.png"]
        assert all(path.stat().st_size for path in paths)
