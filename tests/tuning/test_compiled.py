"""tune=compile: which candidates are tried, who wins and why the others lost, and what is remembered.

The compiler is faked; the last test uses the real one and is skipped where it is missing.
"""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from mstrain.benchmarks import check
from mstrain.benchmarks.config import load
from mstrain.benchmarks.refined import make_task
from mstrain.commands.train import load_config
from mstrain.compiler import DoesNotFit
from mstrain.gemm.precision import Precision
from mstrain.hardware import parse_target
from mstrain.mesh import MeshShape, abstract_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.stages import PipelineConfig
from mstrain.program import step_config
from mstrain.program.optimizer import OptimizerConfig
from mstrain.program.step_config import StepConfig
from mstrain.training.tuned import tuned
from mstrain.tuning import cache
from mstrain.tuning.cache import find_result, result_file
from mstrain.tuning.compiled import (
    COUNTS,
    Candidate,
    TuningTask,
    compile_candidate,
    counts_to_try,
    meshes_to_try,
    on_present,
    refine,
    why_slower,
)
from tests.planner.plans import ranked

MODEL = ModelConfig(name="small", layers=2, width=1024, heads=8, vocab_size=1024, position="alibi")
STEP = StepConfig(MODEL, batch=16, seq=64)
TASK = TuningTask(STEP, parse_target("v5p-8"))
TIMES = {"seconds": 1.0, "exposed": 0.2, "gemm": 0.6, "kernel": 0.1, "move": 0.05, "rest": 0.05}
CANDIDATE = Candidate("2x2", "4", "os/4", 0.1, **TIMES, memory=1e9)


def task_with(**keys) -> TuningTask:
    """TASK with other keys of its step."""
    return dataclasses.replace(TASK, step=dataclasses.replace(STEP, **keys))


def timed(seconds: dict, default: float = 9.0, missing: tuple = ()):
    """Takes so many seconds for (mesh, slices), and has no memory for the meshes `missing`."""

    def attempt(shape: MeshShape, slices: str) -> Candidate:
        problem = "does not fit" if str(shape) in missing else ""
        found = seconds.get((str(shape), slices), default)
        return dataclasses.replace(CANDIDATE, mesh=str(shape), slices=slices, seconds=found, problem=problem)

    return attempt


def counted(attempt):
    """The attempt, and a list of the candidates it makes from now on."""
    made = []

    def count(shape: MeshShape, slices: str) -> Candidate:
        made.append(attempt(shape, slices))
        return made[-1]

    return count, made


def test_the_best_legal_meshes_come_first_then_slice_counts_on_the_fastest():
    fast = next(shape for shape in reversed(meshes_to_try(TASK)) if "2" in counts_to_try(TASK, shape))
    attempt, heard = counted(timed({(str(fast), "auto"): 2.0, (str(fast), "2"): 1.5}))
    result = refine(TASK, attempt)
    legal = [c.shape for c in ranked(MODEL, 16, 64, TASK.tpu_slice)]
    assert [t.mesh for t in heard[:3]] == [str(shape) for shape in legal[:3]]
    assert {t.slices for t in heard[:3]} == {"auto"}
    assert {t.mesh for t in heard[3:]} == {str(fast)}
    assert [t.slices for t in heard[3:]] == counts_to_try(TASK, fast)
    assert (result.best.mesh, result.best.slices, result.best.seconds) == (str(fast), "2", 1.5)
    assert len(result.candidates) == len(heard)


def test_a_faster_candidate_that_does_not_fit_loses():
    first, second, *_ = [str(shape) for shape in meshes_to_try(TASK)]
    result = refine(TASK, timed({(first, "auto"): 0.1, (second, "auto"): 2.0}, missing=(first,)))
    assert result.best.mesh == second
    assert result.candidates[-1].problem == "does not fit"


def test_nothing_that_fits_is_an_error_that_says_what_to_type():
    result = refine(TASK, timed({}, missing=tuple(map(str, meshes_to_try(TASK)))))
    assert result.best is None and {t.slices for t in result.candidates} == {"auto"}
    with pytest.raises(ValueError, match="nothing fits.*Type remat=full"):
        result.chosen()


def test_what_is_given_is_not_searched():
    asked = dataclasses.replace(task_with(parallel=ParallelConfig(slices="2")), meshes=("1x4",))
    assert [(t.mesh, t.slices) for t in refine(asked, timed({})).candidates] == [("row1-col4", "2")]
    asked = task_with(parallel=ParallelConfig("megatron"))
    assert {t.slices for t in refine(asked, timed({})).candidates} == {"auto"}


def test_only_legal_slice_counts_with_another_plan_are_compiled():
    shape = MeshShape(1, 2, 2)
    counts = counts_to_try(TASK, shape)
    assert counts and set(counts) <= set(map(str, COUNTS))
    plans = []
    for slices in ("auto", *counts):
        parallel = ParallelConfig(slices=slices)
        plans.append(make_plan(parallel, MODEL, abstract_mesh(shape), 16, 64, TASK.tpu_slice.chip).groups)
    assert all(plan not in plans[:i] for i, plan in enumerate(plans))
    # 18 features on each of two devices
    narrow = dataclasses.replace(MODEL, width=36, heads=2, num_kv_heads=2, head_dim=18)
    narrow = task_with(model=narrow, parallel=ParallelConfig(dataflow="os"))
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
    assert why_slower(dataclasses.replace(CANDIDATE, **change), CANDIDATE).startswith(why)
    assert bool(why) == bool(why_slower(dataclasses.replace(CANDIDATE, **change), CANDIDATE))


FIRST, SECOND, *_ = map(str, meshes_to_try(TASK))
SEARCH = timed({(SECOND, "auto"): 2.0, (SECOND, "2"): 1.5}, missing=(FIRST,))
WHOLE = refine(TASK, SEARCH)
COUNT = len(WHOLE.candidates)


def ask(folder, attempt=SEARCH):
    """The result to TASK, whether it was kept, the (mesh, slices) tried for it, and the lines said."""
    attempt, made = counted(attempt)
    said = []
    result, kept = find_result(TASK, attempt, said.append, folder)
    return result, kept, [(candidate.mesh, candidate.slices) for candidate in made], said


def interrupt(folder, number: int):
    """Asks, and is interrupted while candidate `number` of this call is made."""
    begun = itertools.count(1)

    def attempt(shape: MeshShape, slices: str) -> Candidate:
        if next(begun) == number:
            raise KeyboardInterrupt
        return SEARCH(shape, slices)

    with pytest.raises(KeyboardInterrupt):
        ask(folder, attempt)


def test_a_question_is_compiled_once(tmp_path):
    result, kept, made, said = ask(tmp_path)
    assert (result, kept, len(made), len(said)) == (WHOLE, False, COUNT, COUNT)
    assert ask(tmp_path) == (WHOLE, True, [], [])
    assert [path.name for path in tmp_path.iterdir()] == [result_file(TASK, tmp_path).name]


@pytest.mark.parametrize("number", range(2, COUNT + 1))
def test_an_interrupted_search_goes_on_where_it_stopped(tmp_path, number):
    """Among the meshes as among the slice counts, and although the first mesh does not fit."""
    everything = ask(tmp_path / "whole")[2]
    interrupt(tmp_path, number)
    result, kept, made, said = ask(tmp_path)
    assert (result, kept, made) == (WHOLE, False, everything[number - 1 :])
    plural = "s" if number > 2 else ""
    assert said[0] == (f"resumes after {number - 1} finished candidate{plural}, found in {result_file(TASK, tmp_path)}")
    assert len(said) == 1 + len(made) and ask(tmp_path) == (WHOLE, True, [], [])


def test_a_search_interrupted_twice_keeps_the_trials_of_both(tmp_path):
    interrupt(tmp_path, 3)
    interrupt(tmp_path, 2)
    result, _, made, _ = ask(tmp_path)
    assert result == WHOLE and len(made) == COUNT - 3


@pytest.mark.parametrize(
    "other",
    [
        task_with(batch=32), task_with(seq=32), task_with(accumulate=2), task_with(dtype="float32"),
        task_with(remat="full"), task_with(offload="moments"), task_with(shard="optimizer"),
        task_with(pipeline=PipelineConfig("gpipe")), task_with(products=Precision("int8")),
        task_with(optimizer=OptimizerConfig(moments="bf16")), task_with(parallel=ParallelConfig(dataflow="ls")),
        task_with(model=dataclasses.replace(MODEL, layers=3)),
        dataclasses.replace(TASK, meshes=("2x2",)), dataclasses.replace(TASK, tpu_slice=parse_target("v6e-4")),
        dataclasses.replace(TASK, tpu_slice=parse_target("2xv5p-8")),
    ],
)  # fmt: skip
def test_another_question_is_another_file(tmp_path, other):
    assert result_file(other, tmp_path) != result_file(TASK, tmp_path)


@pytest.mark.parametrize("name", ["code_digest", "_version"])
def test_other_code_or_another_compiler_is_another_file(tmp_path, monkeypatch, name):
    before = result_file(TASK, tmp_path)
    monkeypatch.setattr(cache, name, lambda *_: "other")
    assert result_file(TASK, tmp_path) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "\udcff",
        lambda text: text.replace('"seconds"', '"secnds"'), lambda text: text.replace('"candidates"', '"trails"'),
        lambda text: text.replace('"complete"', '"whole"'),
        lambda text: json.dumps(json.loads(text) | {"candidates": []}),
        lambda text: json.dumps(json.loads(text) | {"candidates": [{}]}),
        lambda text: text.replace('"batch": 16', '"batch": 17'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("finished", [2, COUNT])
def test_a_damaged_file_is_asked_again_and_mended(tmp_path, finished, damage):
    path = result_file(TASK, tmp_path)
    if finished < COUNT:
        interrupt(tmp_path, finished + 1)
    else:
        ask(tmp_path)
    assert len(json.loads(path.read_text())["candidates"]) == finished
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    result, kept, made, _ = ask(tmp_path)
    assert (result, kept, len(made)) == (WHOLE, False, COUNT)
    assert ask(tmp_path) == (WHOLE, True, [], [])


def test_a_folder_that_cannot_be_written_costs_no_more_than_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert ask(tmp_path / "file")[0] == WHOLE


def test_nothing_is_kept_when_nothing_fits(tmp_path):
    result, _, made, _ = ask(tmp_path, timed({}, missing=tuple(map(str, meshes_to_try(TASK)))))
    assert result.best is None and made and list(tmp_path.iterdir()) == []


def test_a_run_takes_the_answer(tmp_path, monkeypatch):
    """As train.py does on the slice that is here, and check=true for one that is absent."""
    monkeypatch.setattr(cache, "find_result", functools.partial(find_result, folder=tmp_path))
    places = []

    def compiled(task, shape, slices, place):
        places.append(place)
        return timed({("row4-col1", "2"): 0.5})(shape, slices)

    monkeypatch.setattr(cache, "compile_candidate", compiled)
    config = load_config(["model=tiny", "tune=compile", "batch=16", "seq=64", "mesh=4x1"])
    found = [tuned(config, MODEL, TASK.tpu_slice, "bfloat16", "here", Console(quiet=True)) for _ in range(2)]
    assert found[0] == found[1]
    assert (found[0].mesh, found[0].parallel.slices, found[0].tune) == ("row4-col1", "2", "model")
    assert set(places) == {"here"} and len(places) == 1 + len(counts_to_try(TASK, MeshShape(1, 4, 1)))


def test_candidates_are_the_step_that_the_run_trains(monkeypatch):
    """With every key of the step, as check=true compiles it; its time and memory depend on all of them."""
    steps, tasks = [], []

    def step(module, optimizer, batch, accumulate, parts, sums):
        moments = jax.eval_shape(optimizer.init, {"kernel": jnp.zeros((2, 2))})
        steps.append((module, jax.tree.map(lambda x: x.dtype, moments), batch, accumulate, sums))
        raise DoesNotFit("nothing is compiled here", 1, 0)

    def choose(task, place, console):
        tasks.append(task)
        return dataclasses.replace(CANDIDATE, mesh=mesh, slices="auto")

    monkeypatch.setattr(step_config, "step_program", step)
    monkeypatch.setattr(check, "tpu_slice_devices", lambda tpu_slice: None)
    monkeypatch.setattr(check, "make_target", lambda tpu_slice, mesh: on_present(tpu_slice, parse_mesh(mesh)))
    monkeypatch.setattr("mstrain.training.tuned.choose_by_compiling", choose)
    mesh = "data2-stage2-row2-col1"
    config = load_config([
        "model=tiny", "model.vocab_size=256", f"mesh={mesh}", "batch=16", "seq=64", "target=v5p-16", "check=true",
        "tune=compile", "shard=parameters", "remat=attention+mlp-in", "offload=attention", "accumulate=4",
        "precision=int8", "pipeline.schedule=gpipe", "optimizer.moments=bf16", "optimizer.gradients=bf16",
    ])  # fmt: skip
    with pytest.raises(DoesNotFit):
        check.plan_step(config).compile()
    assert compile_candidate(tasks[0], parse_mesh(mesh), "auto", on_present).problem.startswith("nothing is compiled")
    assert steps[0] == steps[1]


def test_benchmark_and_train_ask_the_same(monkeypatch):
    tasks = []
    monkeypatch.setattr("mstrain.training.tuned.choose_by_compiling", lambda task, *_: tasks.append(task) or CANDIDATE)
    shared = ["batch=16", "seq=64", "target=v5p-16", "tune=compile", "shard=gradients", "remat=full", "travel=int8"]
    config = load_config([*shared, "model=gpt3_1_3b", "mesh=data2-row2-col2", "check=true", "optimizer.b1=0.8"])
    tuned(config, config.model, parse_target("v5p-16"), "bfloat16", None, Console(quiet=True))
    asked = load([*shared, "bench=tune", "models=gpt3_1_3b", "meshes=data2-row2-col2"])
    assert make_task(asked, asked.model_configs[0]) == tasks[0]


@pytest.mark.parametrize(
    "arguments", [["mesh=2x2", "parallel.slices=2"], ["mesh=2x2", "parallel=megatron"]]
)  # fmt: skip
def test_nothing_left_to_choose_is_a_mistake(arguments):
    with pytest.raises(ValueError, match="nothing to choose. Type mesh=auto"):
        load_config(["tune=compile", *arguments])


@pytest.mark.usefixtures("tpu_compiler")
def test_a_real_step_is_compiled_for_one_mesh_of_each_question():
    tiny = ModelConfig(name="tiny", layers=1, width=256, heads=2, vocab_size=256, position="alibi")
    task = TuningTask(StepConfig(tiny, 4, 64, ParallelConfig(dataflow="os")), TASK.tpu_slice, ("2x2",))
    candidate = compile_candidate(task, MeshShape(1, 2, 2), "1")
    assert candidate.plan == "os/1 os/1 os/1 os/1" and not candidate.problem
    parts = (candidate.exposed, candidate.gemm, candidate.kernel, candidate.move, candidate.rest)
    assert min(parts) >= 0 and candidate.seconds == pytest.approx(sum(parts))
    assert 0 < candidate.model_seconds < candidate.seconds
    state = 12 * (12 * 256**2 + 2 * 256 * 256) / 4
    assert candidate.memory > state
