"""bench=tune tune=compile as typed: progress, table, files, exit code, and a second call that compiles nothing."""

import csv
import functools
import importlib.metadata
import json

import pytest

from mstrain.benchmarks import refined
from mstrain.benchmarks.command import run
from mstrain.benchmarks.config import load
from mstrain.tuning.cache import find_result, result_file
from mstrain.tuning.compiled import Candidate

ARGUMENTS = ["bench=tune", "tune=compile", "target=v5p-8", "models=tiny", "seq=16", "batch=16"]
SECONDS = {"auto": 3.0, "1": 2.0, "2": 1.0, "4": 4.0, "8": 5.0}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What a compiler that is not needed was asked for: slice counts have the times of SECONDS."""
    asked = []

    def compile_candidate(task, shape, slices):
        asked.append((str(shape), slices))
        if shape.row == 1:
            return Candidate(str(shape), slices, "os/1", 0.5, problem="does not fit", memory=2e11)
        seconds = SECONDS[slices]
        return Candidate(str(shape), slices, "os/1", 0.5, seconds, 0.5, seconds - 0.8, 0.1, 0.1, 0.1, 1e10)

    monkeypatch.setattr(refined, "tpu_slice_devices", lambda tpu_slice: ())
    monkeypatch.setattr(refined, "compile_candidate", compile_candidate)
    monkeypatch.setattr(refined, "find_result", functools.partial(find_result, folder=tmp_path / "tuned"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    return asked


def shown(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_fastest_is_named_and_the_others_say_why_not(compiled, tmp_path, capsys):
    where = f"run_dir={tmp_path / 'run'}"
    assert run([*ARGUMENTS, "meshes=2x2 1x4", where]) == 0
    out = shown(capsys)
    assert "type mesh=row2-col2 parallel.slices=2" in out and "not run" in out and "libtpu 1.2.3" in out
    assert "does not fit" in out
    assert compiled[:2] == [("row2-col2", "auto"), ("row1-col4", "auto")] and ("row2-col2", "2") in compiled[2:]
    document = json.loads((tmp_path / "run" / "tune_compiled_tiny.json").read_text())
    assert document["kind"] == "predicted" and document["source"].startswith("Predicted for v5p-8 (4 devices)")
    assert [t["why"] for t in document["candidates"][:2]] == ["", "products +2,000.0 ms"]
    assert all(t["why"] for t in document["candidates"][1:])
    with (tmp_path / "run" / "tune_compiled_tiny.csv").open() as file:
        assert [row["slices"] for row in csv.DictReader(file)] == [t["slices"] for t in document["candidates"]]
    assert (tmp_path / "run" / "tune_compiled_tiny.png").stat().st_size


def test_a_second_call_compiles_nothing(compiled, tmp_path, capsys):
    arguments = [*ARGUMENTS, "meshes=2x2", f"run_dir={tmp_path / 'run'}"]
    assert run(arguments) == 0
    count = len(compiled)
    first = shown(capsys)
    assert run(arguments) == 0 and len(compiled) == count
    assert "Found in" in shown(capsys) and "Found in" not in first
    assert run([*arguments, "remat=full"]) == 0 and len(compiled) > count


def test_a_call_after_an_interruption_says_what_it_found(compiled, tmp_path, monkeypatch, capsys):
    arguments = [*ARGUMENTS, "meshes=2x2", f"run_dir={tmp_path / 'run'}"]
    uninterrupted = refined.compile_candidate

    def interrupted(task, shape, slices):
        if slices != "auto":
            raise KeyboardInterrupt
        return uninterrupted(task, shape, slices)

    monkeypatch.setattr(refined, "compile_candidate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(arguments)
    monkeypatch.setattr(refined, "compile_candidate", uninterrupted)
    capsys.readouterr()
    assert run(arguments) == 0 and compiled.count(("row2-col2", "auto")) == 1
    out = shown(capsys)
    assert "resumes after 1 finished candidate, found in" in out and "type mesh=row2-col2 parallel.slices=2" in out


def test_nothing_that_fits_is_exit_code_1(compiled, tmp_path, capsys):
    assert run([*ARGUMENTS, "meshes=1x4", f"run_dir={tmp_path / 'run'}"]) == 1
    assert compiled == [("row1-col4", "auto")] and "does not fit" in shown(capsys)
    assert list((tmp_path / "tuned").iterdir()) == []


def test_a_smaller_mesh_gets_copies_beside_each_other():
    config = load([*ARGUMENTS, "meshes=1x2", "slices=2"])
    task = refined.make_task(config, config.model_configs[0])
    assert task.meshes == ("data2-row1-col2",) and task.step.parallel.slices == "2"


def test_all_meshes_are_those_that_the_torus_carries():
    config = load([*ARGUMENTS, "meshes=all"])
    task = refined.make_task(config, config.model_configs[0])
    assert set(task.meshes) == {f"row{r}-col{c}" for r, c in config.tpu_slice.mesh_shapes()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune=compile"], "Type bench=tune target="),
        (["bench=tune", "tune=compile"], "Type bench=tune target="),
        (["bench=tune", "tune=complie", "target=v5p-8"], "Did you mean tune=compile"),
        ([*ARGUMENTS, "constants=tpu_v4_reference"], "reads schedules"),
    ],
)
def test_a_mistake_says_what_to_type(arguments, words):
    with pytest.raises(ValueError, match=words):
        load(arguments)


def test_the_file_is_where_the_message_says():
    config = load(ARGUMENTS)
    path = result_file(refined.make_task(config, config.model_configs[0]))
    assert path.parent.name == "tuned" and path.name.startswith("tiny-v5p_2x2x1-")
