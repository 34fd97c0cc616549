"""A run that was cut and resumed is the run that was not, on its own mesh and on any other."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import mstrain
from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.cli import Command, run_command
from mstrain.program.step import init_state
from mstrain.training import session
from mstrain.training.goodput import Goodput
from mstrain.training.session import train
from tests.quick import QUICK
from tests.training.runs import ARGUMENTS, lines, losses, make, saved_steps

CUT = 4  # the step after which the copies below go on
ELSEWHERE = {
    "other slices and tall": ["mesh=4x2", "parallel.slices=4", "parallel.dataflow=os"],
    "other algorithms and copies": [
        "mesh=2x2x2",
        'parallel.layers="0:cannon 1:fsdp 1:mlp:wang"',
        "parallel=megatron",
        "shard=parameters",
    ],
    "one device and microbatches": ["mesh=1x1", "parallel=gspmd", "accumulate=2", "remat=full"],
}


def copy_cut_after(step: int, finished, directory: Path) -> Path:
    """The directory of the finished run as if its process had died before its next save after `step`."""
    shutil.copytree(finished.config.run_dir, directory)
    for saved in saved_steps(directory):
        if saved > step:
            shutil.rmtree(directory / "checkpoints" / str(saved))
    return directory


def in_directory(run, directory: Path):
    """The same run, compiled step and all, in another directory."""
    moved = dataclasses.replace(run, config=dataclasses.replace(run.config, run_dir=str(directory)))
    vars(moved).update(compiled_step=run.compiled_step)
    return moved


def test_the_newest_checkpoints_are_kept(finished):
    assert saved_steps(Path(finished.config.run_dir)) == [4, 6]


def test_resume_on_the_same_mesh_is_bit_identical(finished, tmp_path):
    directory = copy_cut_after(CUT, finished, tmp_path / "run")
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 1.2')  # a line the kill cut short
    assert train(in_directory(finished, directory)) == 0
    whole = Path(finished.config.run_dir)
    assert losses(directory) == losses(whole)
    for name in ("grad_norm", "learning_rate"):
        assert [row[name] for row in lines(directory)] == [row[name] for row in lines(whole)]
    assert lines(directory, "eval.jsonl") == lines(whole, "eval.jsonl")
    assert saved_steps(directory) == [4, 6]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_resume_elsewhere_agrees(elsewhere, finished, tmp_path):
    directory = copy_cut_after(CUT, finished, tmp_path / "run")
    run = make(directory, "steps=6", *ELSEWHERE[elsewhere])
    checkpoints = Checkpoints(directory / "checkpoints", 2)
    state = checkpoints.restore(checkpoints.latest, run.module, run.optimizer)
    checkpoints.close()
    found = []
    for step in range(CUT + 1, 7):
        assert int(state["step"]) == step - 1
        state, metrics = run.step(state, run.feed(step - 1))
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    expected = [[row["loss"], row["grad_norm"]] for row in lines(Path(finished.config.run_dir))[CUT:]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_finished_run_says_so(finished, tmp_path):
    directory = copy_cut_after(6, finished, tmp_path / "run")
    shown = io.StringIO()
    run = dataclasses.replace(in_directory(finished, directory), console=Console(file=shown, soft_wrap=True))
    before = (directory / "metrics.jsonl").read_text()
    assert train(run) == 0
    assert "has all 6 steps. Type steps=N allow=steps with N above 6" in shown.getvalue()
    assert (directory / "metrics.jsonl").read_text() == before


def test_a_run_that_was_killed_before_its_summary_writes_it_at_the_next_start(finished, tmp_path):
    directory = copy_cut_after(6, finished, tmp_path / "run")
    whole = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text('{"steps": 4}')  # of the run before steps=6 allow=steps
    assert train(dataclasses.replace(in_directory(finished, directory), goodput=Goodput())) == 0
    summary = json.loads((directory / "summary.json").read_text())
    for name in ("steps", "validation_loss", "unigram_bits_per_byte", "bad_steps"):
        assert summary[name] == whole[name], name
    assert summary["training_seconds"] >= whole["training_seconds"] > 0  # of all attempts
    assert summary["attempts"] == 2 and summary["tokens_per_second"] is None
    assert lines(directory) == lines(Path(finished.config.run_dir))


def test_tokens_are_counted_with_the_batches_that_were_seen(finished, tmp_path):
    directory = copy_cut_after(CUT, finished, tmp_path / "run")
    for steps in (6, 8):
        words = ["mesh=2x4", f"steps={steps}", "batch=8", "seq=16", "allow=batch steps", "checkpoint.every=1"]
        assert train(make(directory, *words)) == 0
    assert [row["tokens_seen"] for row in lines(directory)] == [16 * 16 * k for k in range(1, CUT + 1)] + [
        16 * 16 * CUT + 8 * 16 * k for k in range(1, 5)
    ]


def test_a_trace_of_steps_that_are_done_says_so(finished, tmp_path, capsys):
    directory = copy_cut_after(CUT, finished, tmp_path / "run")
    assert train(make(directory, "mesh=2x4", "steps=6", "profile.start=3", "profile.steps=2")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "profile.start=3 is a step of an earlier attempt" in shown and "Type a start from 5 on" in shown


def test_a_checkpoint_of_another_model_is_refused_with_its_shapes(finished, tmp_path, monkeypatch, capsys):
    directory = copy_cut_after(CUT, finished, tmp_path / "run")
    model = dataclasses.replace(finished.module.model, mlp_dim=128)
    config = dataclasses.replace(finished.config, run_dir=str(directory))
    run = dataclasses.replace(finished, config=config, module=dataclasses.replace(finished.module, model=model))
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as left:
        run_command(Command("train", lambda _: session.train(run)))
    error = capsys.readouterr().err
    assert left.value.code == 2 and "belongs to another model" in error and "Traceback" not in error
    assert "blocks_0.mlp.down.kernel: checkpoint (2, 256, 64), model (2, 128, 64)" in error
    assert "attention" not in error and "another run_dir=" in error


def test_the_step_owns_its_state(finished):
    state = init_state(finished.module, finished.optimizer, 0)
    before = jax.tree.leaves(state)
    after, _ = finished.step(state, finished.feed(0))
    assert all(leaf.is_deleted() for leaf in before if leaf.ndim)
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)


@pytest.fixture
def as_the_run(monkeypatch):
    """On the devices of the mesh, compiled with the options of the finished run."""
    monkeypatch.setattr("mstrain.program.program.compiler_options", lambda chip, algorithm: QUICK)
    monkeypatch.setattr("mstrain.mesh.fit_to_devices", lambda shape, devices: shape)


def test_a_loop_of_ones_own_has_the_losses_of_the_run(finished, as_the_run):
    cache = f"data.cache_dir={finished.config.data.cache_dir}"
    state, step, feed = mstrain.trainer(*ARGUMENTS, cache, "mesh=2x4", "parallel.slices=2", "steps=6")
    seen = []
    for k in range(4):
        state, metrics = step(state, np.asarray(feed(k).tokens)[0] if k == 2 else feed(k))
        seen.append(float(metrics["loss"]))
    assert seen == losses(Path(finished.config.run_dir))[:4] and int(state["step"]) == 4
    for tokens, message in ((np.zeros((8, 16)), "batch x"), (np.full((16, 17), 61), "vocabulary of 61")):
        with pytest.raises(ValueError, match=message):
            step(state, tokens)


def test_a_loop_continues_from_the_newest_checkpoint_of_a_run(finished, as_the_run):
    directory = Path(finished.config.run_dir)
    before = sorted(directory.rglob("*"))
    state, _, _ = mstrain.trainer(f"run_dir={directory}", "mesh=2x4")
    assert sorted(directory.rglob("*")) == before
    _, params = mstrain.load(directory, "mesh=2x4")
    jax.tree.map(np.testing.assert_array_equal, params, state["params"])
    assert int(state["step"]) == 6
    with pytest.raises(ValueError, match="no run has saved"):
        mstrain.trainer(f"run_dir={directory / 'nowhere'}")
