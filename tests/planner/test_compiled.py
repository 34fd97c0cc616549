"""tune=compile: which candidates are tried, who wins and why the others lost, and what is remembered.

The compiler is faked; the last test uses the real one and is skipped where it is missing.
"""

import dataclasses
import functools
import itertools
import json

import pytest
from rich.console import Console

from mstrain.commands.train import load_config
from mstrain.hardware import parse_target
from mstrain.mesh import MeshShape
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.planner import tuning_cache
from mstrain.planner.compiled import (
    COUNTS,
    Question,
    Trial,
    compile_candidate,
    counts_to_try,
    meshes_to_try,
    refine,
    why_slower,
)
from mstrain.planner.meshes import best_meshes, plan_on
from mstrain.planner.tuning_cache import answer_file, find_answer, tuned

MODEL = ModelConfig(name="small", layers=2, width=1024, heads=8, vocab_size=1024, position="alibi")
QUESTION = Question(MODEL, ParallelConfig(), parse_target("v5p-8"), 16, 64)
TIMES = {"seconds": 1.0, "exposed": 0.2, "gemm": 0.6, "kernel": 0.1, "move": 0.05, "rest": 0.05}
TRIAL = Trial("2x2", "4", "os/4", 0.1, **TIMES, memory=1e9)


def timed(seconds: dict, default: float = 9.0, missing: tuple = ()):
    """Takes so many seconds for (mesh, slices), and has no memory for the meshes `missing`."""

    def attempt(shape: MeshShape, slices: str) -> Trial:
        problem = "does not fit" if str(shape) in missing else ""
        found = seconds.get((str(shape), slices), default)
        return dataclasses.replace(TRIAL, mesh=str(shape), slices=slices, seconds=found, problem=problem)

    return attempt


def counted(attempt):
    """The attempt, and a list of the trials it makes from now on."""
    made = []

    def count(shape: MeshShape, slices: str) -> Trial:
        made.append(attempt(shape, slices))
        return made[-1]

    return count, made


def test_the_best_legal_meshes_come_first_then_slice_counts_on_the_fastest():
    attempt, heard = counted(timed({("4x1", "auto"): 2.0, ("4x1", "2"): 1.5}))
    answer = refine(QUESTION, attempt)
    legal = [c.shape for c in best_meshes(ParallelConfig(), MODEL, 16, 64, 4, QUESTION.tpu_slice)]
    assert [t.mesh for t in heard[:3]] == [str(shape) for shape in legal[:3]]
    assert {t.slices for t in heard[:3]} == {"auto"}
    assert {t.mesh for t in heard[3:]} == {"4x1"} and [t.slices for t in heard[3:]] == counts_to_try(
        QUESTION, MeshShape(1, 4, 1)
    )  # fmt: skip
    assert (answer.best.mesh, answer.best.slices, answer.best.seconds) == ("4x1", "2", 1.5)
    assert len(answer.trials) == len(heard)


def test_a_faster_candidate_that_does_not_fit_loses():
    first, second, *_ = [str(shape) for shape in meshes_to_try(QUESTION)]
    answer = refine(QUESTION, timed({(first, "auto"): 0.1, (second, "auto"): 2.0}, missing=(first,)))
    assert answer.best.mesh == second
    assert answer.trials[-1].problem == "does not fit"


def test_nothing_that_fits_is_an_error_that_says_what_to_type():
    answer = refine(QUESTION, timed({}, missing=tuple(map(str, meshes_to_try(QUESTION)))))
    assert answer.best is None and {t.slices for t in answer.trials} == {"auto"}
    with pytest.raises(ValueError, match="nothing fits.*Type remat=full"):
        answer.chosen()


def test_what_is_given_is_not_searched():
    asked = dataclasses.replace(QUESTION, meshes=("1x4",), parallel=ParallelConfig(slices="2"))
    assert [(t.mesh, t.slices) for t in refine(asked, timed({})).trials] == [("1x4", "2")]
    asked = dataclasses.replace(QUESTION, parallel=ParallelConfig("megatron"))
    assert {t.slices for t in refine(asked, timed({})).trials} == {"auto"}


def test_only_legal_slice_counts_with_another_plan_are_compiled():
    shape = MeshShape(1, 2, 2)
    counts = counts_to_try(QUESTION, shape)
    assert counts and set(counts) <= set(map(str, COUNTS))
    plans = []
    for slices in ("auto", *counts):
        parallel = ParallelConfig(slices=slices)
        plans.append(plan_on(shape, parallel, MODEL, 16, 64, QUESTION.tpu_slice.chip).groups)
    assert all(plan not in plans[:i] for i, plan in enumerate(plans))
    sizes = dict(width=36, heads=2, num_kv_heads=2, head_dim=18, mlp_dim=144)
    narrow = dataclasses.replace(MODEL, **sizes)  # 18 features on each of two devices
    narrow = dataclasses.replace(QUESTION, model=narrow, parallel=ParallelConfig(dataflow="os"))
    assert set(counts_to_try(narrow, shape)) <= {"1", "2"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"exposed": 0.5, "seconds": 1.3}, "exposed communication +300.0 ms"),
        ({"gemm": 0.65, "exposed": 0.21, "seconds": 1.06}, "products +50.0 ms"),
        ({"move": 0.45, "seconds": 1.4}, "copies +400.0 ms"),
        ({"problem": "needs 99.0 GiB of 95.0 GiB.", "seconds": None}, "needs 99.0 GiB"),
        ({}, ""),
    ],
)
def test_the_part_that_grew_most_is_why(change, why):
    assert why_slower(dataclasses.replace(TRIAL, **change), TRIAL).startswith(why)
    assert bool(why) == bool(why_slower(dataclasses.replace(TRIAL, **change), TRIAL))


FIRST, SECOND, *_ = map(str, meshes_to_try(QUESTION))
SEARCH = timed({(SECOND, "auto"): 2.0, (SECOND, "2"): 1.5}, missing=(FIRST,))
WHOLE = refine(QUESTION, SEARCH)
COUNT = len(WHOLE.trials)


def ask(folder, attempt=SEARCH):
    """The answer to QUESTION, whether it was kept, the (mesh, slices) tried for it, and the lines said."""
    attempt, made = counted(attempt)
    said = []
    answer, kept = find_answer(QUESTION, attempt, said.append, folder)
    return answer, kept, [(trial.mesh, trial.slices) for trial in made], said


def interrupt(folder, number: int):
    """Asks, and is interrupted while trial `number` of this call is made."""
    begun = itertools.count(1)

    def attempt(shape: MeshShape, slices: str) -> Trial:
        if next(begun) == number:
            raise KeyboardInterrupt
        return SEARCH(shape, slices)

    with pytest.raises(KeyboardInterrupt):
        ask(folder, attempt)


def test_a_question_is_compiled_once(tmp_path):
    answer, kept, made, said = ask(tmp_path)
    assert (answer, kept, len(made), len(said)) == (WHOLE, False, COUNT, COUNT)
    assert ask(tmp_path) == (WHOLE, True, [], [])
    assert [path.name for path in tmp_path.iterdir()] == [answer_file(QUESTION, tmp_path).name]


@pytest.mark.parametrize("number", range(2, COUNT + 1))
def test_an_interrupted_search_goes_on_where_it_stopped(tmp_path, number):
    """Among the meshes as among the slice counts, and although the first mesh does not fit."""
    everything = ask(tmp_path / "whole")[2]
    interrupt(tmp_path, number)
    answer, kept, made, said = ask(tmp_path)
    assert (answer, kept, made) == (WHOLE, False, everything[number - 1 :])
    plural = "s" if number > 2 else ""
    assert said[0] == (
        f"goes on after {number - 1} finished trial{plural}, found in {answer_file(QUESTION, tmp_path)}"
    )
    assert len(said) == 1 + len(made) and ask(tmp_path) == (WHOLE, True, [], [])


def test_a_search_interrupted_twice_keeps_the_trials_of_both(tmp_path):
    interrupt(tmp_path, 3)
    interrupt(tmp_path, 2)
    answer, _, made, _ = ask(tmp_path)
    assert answer == WHOLE and len(made) == COUNT - 3


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 32}, {"seq": 32}, {"accumulate": 2}, {"dtype": "float32"}, {"remat": "full"},
        {"meshes": ("2x2",)},
        {"tpu_slice": parse_target("v6e-4")}, {"parallel": ParallelConfig(dataflow="ls")},
        {"model": dataclasses.replace(MODEL, layers=3)},
    ],
)  # fmt: skip
def test_another_question_is_another_file(tmp_path, change):
    other = dataclasses.replace(QUESTION, **change)
    assert answer_file(other, tmp_path) != answer_file(QUESTION, tmp_path)


@pytest.mark.parametrize("name", ["code_digest", "_version"])
def test_other_code_or_another_compiler_is_another_file(tmp_path, monkeypatch, name):
    before = answer_file(QUESTION, tmp_path)
    monkeypatch.setattr(tuning_cache, name, lambda *_: "other")
    assert answer_file(QUESTION, tmp_path) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "\udcff",
        lambda text: text.replace('"seconds"', '"secnds"'), lambda text: text.replace('"trials"', '"trails"'),
        lambda text: text.replace('"complete"', '"whole"'),
        lambda text: json.dumps(json.loads(text) | {"trials": []}),
        lambda text: json.dumps(json.loads(text) | {"trials": [{}]}),
        lambda text: text.replace('"batch": 16', '"batch": 17'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("finished", [2, COUNT])
def test_a_damaged_file_is_asked_again_and_mended(tmp_path, finished, damage):
    path = answer_file(QUESTION, tmp_path)
    if finished < COUNT:
        interrupt(tmp_path, finished + 1)
    else:
        ask(tmp_path)
    assert len(json.loads(path.read_text())["trials"]) == finished
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    answer, kept, made, _ = ask(tmp_path)
    assert (answer, kept, len(made)) == (WHOLE, False, COUNT)
    assert ask(tmp_path) == (WHOLE, True, [], [])


def test_a_folder_that_cannot_be_written_costs_no_more_than_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert ask(tmp_path / "file")[0] == WHOLE


def test_nothing_is_kept_when_nothing_fits(tmp_path):
    answer, _, made, _ = ask(tmp_path, timed({}, missing=tuple(map(str, meshes_to_try(QUESTION)))))
    assert answer.best is None and made and list(tmp_path.iterdir()) == []


def test_a_run_takes_the_answer(tmp_path, monkeypatch):
    """As train.py does on the slice that is here, and check=true for one that is absent."""
    monkeypatch.setattr(tuning_cache, "find_answer", functools.partial(find_answer, folder=tmp_path))
    places = []

    def compiled(question, shape, slices, place):
        places.append(place)
        return timed({("4x1", "2"): 0.5})(shape, slices)

    monkeypatch.setattr(tuning_cache, "compile_candidate", compiled)
    config = load_config(["model=tiny", "tune=compile", "batch=16", "seq=64", "mesh=4x1"])
    found = [tuned(config, MODEL, QUESTION.tpu_slice, "bfloat16", "here", Console(quiet=True)) for _ in range(2)]
    assert found[0] == found[1]
    assert (found[0].mesh, found[0].parallel.slices, found[0].tune) == ("4x1", "2", "model")
    assert set(places) == {"here"} and len(places) == 1 + len(counts_to_try(QUESTION, MeshShape(1, 4, 1)))


@pytest.mark.parametrize(
    "arguments", [["mesh=2x2", "parallel.slices=2"], ["mesh=2x2", "parallel=megatron"]]
)  # fmt: skip
def test_nothing_left_to_choose_is_a_mistake(arguments):
    with pytest.raises(ValueError, match="nothing to choose. Type mesh=auto"):
        load_config(["tune=compile", *arguments])


@pytest.mark.usefixtures("tpu_compiler")
def test_a_real_step_is_compiled_for_one_mesh_of_each_question():
    tiny = ModelConfig(name="tiny", layers=1, width=256, heads=2, vocab_size=256, position="alibi")
    question = Question(tiny, ParallelConfig(), QUESTION.tpu_slice, 4, 64, meshes=("2x2",))
    trial = compile_candidate(question, MeshShape(1, 2, 2), "1")
    assert trial.plan == "os/1 ls/1 os/1 ls/1" and not trial.problem
    parts = (trial.exposed, trial.gemm, trial.kernel, trial.move, trial.rest)
    assert min(parts) >= 0 and trial.seconds == pytest.approx(sum(parts))
    assert 0 < trial.model_seconds < trial.seconds
    state = 12 * (12 * 256**2 + 2 * 256 * 256) / 4
    assert trial.memory > state
