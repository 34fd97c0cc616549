"""A comparison that takes hours: every row is told and kept when it is done, whatever becomes of the next."""

import csv
import re

import pytest
from rich.console import Console

from mstrain.benchmarks.cases import Case
from mstrain.benchmarks.comparison import Comparison, Progress, duration, run_comparison
from mstrain.benchmarks.table import Report, Row, from_json
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig

CASES = [Case(ModelConfig(name="tiny"), MeshShape(1, 2, 4), name, 8) for name in ("wang", "cannon", "fsdp")]
HEAD = Report("predicted", "Predicted for a test", "gemm", "bfloat16", 459e12)


def row(case, part):
    return Row("tiny", "2x4", case.algorithm, part, seconds=0.25, mfu=0.5)


def rows_of(case):
    yield row(case, "first")
    if case.algorithm == "cannon":
        raise ValueError("cannon needs a square mesh")
    yield row(case, "second")


def test_a_case_that_breaks_says_so_and_the_others_go_on():
    found = list(Comparison(HEAD, CASES, 2, rows_of).rows())
    assert [done for done, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [(r.algorithm, r.part) for _, r in found[:3]] == [
        ("wang", "first"), ("wang", "second"), ("cannon", "first"),
    ]  # fmt: skip
    assert found[3][1].problem == "cannon needs a square mesh"
    assert all(r.seconds for _, r in found[4:])


def test_an_interrupted_comparison_keeps_what_it_has(tmp_path, capsys):
    def interrupted(case):
        if case.algorithm == "fsdp":
            raise KeyboardInterrupt
        yield from rows_of(case)

    with pytest.raises(KeyboardInterrupt):
        run_comparison(Comparison(HEAD, CASES, 2, interrupted), tmp_path, Console(width=200))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.csv", "benchmark.json"]
    report = from_json((tmp_path / "benchmark.json").read_text())
    assert (report.kind, report.source, report.unfinished) == ("predicted", HEAD.source, 2)
    assert [r.algorithm for r in report.rows] == ["wang", "wang", "cannon", "cannon"]
    with (tmp_path / "benchmark.csv").open() as file:
        assert [line["kind"] for line in csv.DictReader(file)] == ["predicted"] * 4
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"1 of 6  .* left  tiny wang on 2x4, first: 250.00 ms, MFU 50.0%", lines[0])
    assert lines[3].startswith("4 of 6") and lines[3].endswith("cannon needs a square mesh")


def test_every_row_is_on_disk_before_the_next_is_begun(tmp_path):
    def looks(case):
        rows_before = [name for name in ("wang", "cannon", "fsdp")].index(case.algorithm)
        if rows_before:
            assert len(from_json((tmp_path / "benchmark.json").read_text()).rows) == rows_before
        yield row(case, "step")

    report = run_comparison(Comparison(HEAD, CASES, 1, looks), tmp_path, Console(quiet=True))
    assert len(report.rows) == 3 and report.unfinished == 0
    assert from_json((tmp_path / "benchmark.json").read_text()) == report


def test_the_time_left_follows_from_the_time_taken():
    times = iter([100.0, 190.0, 280.0])
    progress = Progress(4, lambda: next(times))
    assert progress.line(2, "a row") == "2 of 4  1 min 30 s, about 1 min 30 s left  a row"
    assert progress.line(4, "the last") == "4 of 4  3 min 0 s  the last"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3900, "1 h 5 min")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
