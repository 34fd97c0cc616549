"""The search over groups of compiler options, against an answer known beforehand. Nothing is compiled."""

import csv

from tests.compiler.options import GROUPS, ONLY, SEARCH, Trial, groups_of, search, write_rows


def attempt_of(seconds, refused=()):
    def attempt(groups):
        if set(groups) & set(refused):
            return Trial(groups, problem="refused")
        total = 1.0
        for group in groups:
            total *= seconds.get(group, 1.0)
        return Trial(groups, total, total, total, 0.0, 0)

    return attempt


def test_a_group_is_kept_if_it_helps_beside_those_kept():
    seconds = {"a": 0.8, "b": 1.2, "c": 0.995, "d": 0.9}
    trials = list(search(attempt_of(seconds, refused=("e",)), ("a", "b", "c", "e", "d")))
    assert [trial.groups for trial, _ in trials] == [(), ("a",), ("a", "b"), ("a", "c"), ("a", "e"), ("a", "d")]
    assert [kept for _, kept in trials] == [True, True, False, False, False, True]
    assert trials[4][0].problem == "refused"


def test_without_a_result_of_the_chip_s_own_options_nothing_else_is_tried():
    (only,) = search(lambda groups: Trial(groups, problem="refused"), ("a", "b"))
    assert only == (Trial((), problem="refused"), False)


def test_groups_that_only_gspmd_reads_are_tried_for_it_alone():
    assert set(groups_of("gspmd")) - set(groups_of("fsdp")) == set(ONLY)
    assert set(groups_of("gspmd")) == set(GROUPS) > set(ONLY)
    assert groups_of("fsdp", ["windowed einsum, all", "layer scheduler"]) == ("layer scheduler",)


def test_a_search_replaces_its_own_rows(tpu_compiler, tmp_path):
    table = tmp_path / "options.csv"
    layer, step = (dict(zip(SEARCH, ("v6e-32", "fsdp", part, "16384"), strict=True)) for part in ("layer", "step"))
    write_rows(layer, [(Trial((), 2.0, 1.0, 3.0, 0.5, 1), True)], table)
    write_rows(step, [(Trial((), problem="refused"), False)], table)
    write_rows(layer, [(Trial((), 4.0), True), (Trial(("a", "b"), 3.0), True)], table)
    rows = list(csv.DictReader(table.open()))
    assert [(r["program"], r["groups"], r["seconds"], r["kept"], r["problem"]) for r in rows] == [
        ("layer", "", "4", "true", ""), ("layer", "a + b", "3", "true", ""), ("step", "", "", "false", "refused"),
    ]  # fmt: skip
