"""Checkpoints that were damaged, cannot be written or cannot be read: what a run does, and what it says."""

import dataclasses
import io
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mstrain.checkpoints import manifest
from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.commands.train import load_config
from mstrain.job.job import ALONE
from mstrain.job.lock import Lock
from mstrain.training import resume, run_lock
from mstrain.training.run_lock import exclusive
from mstrain.training.session import _make_folder, train
from mstrain.training.stopped import Stopped
from tests.training.runs import lines, make, saved_steps

WORDS = ("mesh=2x2", "model.layers=1", "parallel.slices=2", "steps=6", "checkpoint.every=2", "eval.every=100")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run with checkpoints 2, 4 and 6; its compiled step serves every test here."""
    run = make(tmp_path_factory.mktemp("storage") / "made", *WORDS)
    assert train(run) == 0
    return run


def again(made, directory, **changes):
    """The same run in another directory, its output recorded."""
    console = Console(file=io.StringIO(), record=True, width=400)
    config = dataclasses.replace(made.config, run_dir=str(directory), **changes)
    run = dataclasses.replace(made, config=config, console=console)
    run.__dict__["compiled_step"] = made.compiled_step
    return run


def printed(run) -> str:
    return run.console.export_text(clear=False)


def folder_of(run) -> Path:
    return Path(run.config.run_dir)


def copy(made, tmp_path):
    return shutil.copytree(made.config.run_dir, tmp_path / "run")


def biggest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_second_trainer_is_refused_before_it_prepares_anything(made, tmp_path):
    with exclusive(str(tmp_path / "run"), ALONE):
        command = [sys.executable, "-m", "mstrain", "train", f"run_dir={tmp_path / 'run'}", "mesh=1x1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"run_dir={tmp_path / 'run'}: process {os.getpid()} on {socket.gethostname()} since" in done.stderr
    assert not (tmp_path / "run").exists()  # the first one has written nothing, either


def test_a_run_that_another_trainer_took_over_saves_nothing_more(made, tmp_path):
    run = again(made, tmp_path / "run")
    lock = Lock(folder_of(run) / "lock", print, beat_seconds=1000)
    lock.acquire()
    other = Lock(folder_of(run) / "lock", print)

    def check():
        if 2 in saved_steps(folder_of(run)):
            shutil.rmtree(folder_of(run) / "lock")
            other.acquire()
        run_lock.checked(lock, run.config.run_dir)()

    with pytest.raises(Stopped) as stopped:
        train(run, check)
    other.release()
    assert stopped.value.code == 2 and "Another trainer has taken run_dir" in printed(run)
    assert saved_steps(folder_of(run)) == [2] and str(os.getpid()) in printed(run)


def flip_a_bit(folder):
    path = biggest_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(folder):
    os.truncate(biggest_file(folder), 100)


def lose_a_part(folder):
    shutil.rmtree(folder / "state" / "ocdbt.process_0")


def lose_the_manifest(folder):
    (folder / manifest.NAME).unlink()


def garble_the_manifest(folder):
    (folder / manifest.NAME).write_text('{"files": [1')


DAMAGE = {
    flip_a_bit: "checksum differs", truncate: "has 100 bytes", lose_a_part: "is missing",
    lose_the_manifest: "half deleted", garble_the_manifest: "manifest.json is damaged",
}  # fmt: skip


@pytest.mark.parametrize("harm", DAMAGE, ids=lambda harm: harm.__name__)
def test_damage_is_named_and_the_newest_good_checkpoint_used(harm, made, tmp_path):
    directory = copy(made, tmp_path)
    harm(directory / "checkpoints" / "6")
    run = again(made, directory)
    assert train(run) == 0
    text = printed(run)
    assert "Checkpoint 6 is damaged" in text and DAMAGE[harm] in text
    assert "2 steps since the good checkpoint of step 4 are repeated" in text and "Resume after step 4" in text
    assert (directory / "damaged" / "6").is_dir() and saved_steps(directory) == [2, 4, 6]
    assert [(row["step"], row["loss"]) for row in lines(directory)] == [
        (row["step"], row["loss"]) for row in lines(folder_of(made))
    ]


@pytest.mark.parametrize("kind", ["a link", "not a folder"])
def test_a_damaged_checkpoint_is_not_moved_out_of_the_run_directory(kind, made, tmp_path):
    directory, other = copy(made, tmp_path), tmp_path / "other"
    other.mkdir()
    truncate(directory / "checkpoints" / "6")
    if kind == "a link":
        (directory / "damaged").symlink_to(other)
    else:
        (directory / "damaged").write_text("")
    with pytest.raises(ValueError, match=f"cannot be moved to .*damaged, {kind}. Remove that"):
        train(again(made, directory))
    assert saved_steps(directory) == [2, 4, 6] and not [*other.iterdir()]


def test_nothing_good_left_is_a_refusal(made, tmp_path):
    directory = copy(made, tmp_path)
    for step in saved_steps(directory):
        truncate(directory / "checkpoints" / str(step))
    for _ in range(2):  # the second start finds no checkpoint at all
        with pytest.raises(ValueError, match="no checkpoint .* shows 6 steps .*metrics.jsonl.*allow=lost_steps:6"):
            train(again(made, directory))
    assert len(lines(directory)) == 6


def test_a_start_that_is_allowed_to_lose_steps_keeps_their_files(made, tmp_path):
    directory = copy(made, tmp_path)
    shutil.rmtree(directory / "checkpoints")
    assert train(again(made, directory, allow="lost_steps:6")) == 0
    kept = directory / "lost" / "1"
    assert lines(directory) and [row["loss"] for row in lines(kept)] == [row["loss"] for row in lines(folder_of(made))]
    assert saved_steps(directory) == [2, 4, 6] and not (kept / "history.jsonl").exists()


def test_a_run_killed_before_its_first_save_starts_again_by_itself(made, tmp_path, monkeypatch):
    def killed(step_fn, feed, state, steps, hooks, reporter):
        for step in (1, 2):
            state, metrics = step_fn(state, feed(step - 1))
            reporter.step(step, metrics)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mstrain.training.loop.train", killed)
        train(again(made, tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == [0] and len(lines(tmp_path / "run")) == 2
    assert train(again(made, tmp_path / "run")) == 0
    assert [row["loss"] for row in lines(tmp_path / "run")] == [row["loss"] for row in lines(folder_of(made))]
    assert saved_steps(tmp_path / "run") == [2, 4, 6]


def test_step_0_is_not_taken_for_a_good_checkpoint_of_a_run_that_went_further(made, tmp_path):
    directory = copy(made, tmp_path)
    shutil.copytree(directory / "checkpoints" / "2", directory / "checkpoints" / "0")
    for step in (2, 4, 6):
        truncate(directory / "checkpoints" / str(step))
    for _ in range(2):
        with pytest.raises(ValueError, match="allow=lost_steps:6"):
            train(again(made, directory))


def test_a_newer_format_is_refused(made, tmp_path, monkeypatch):
    directory = copy(made, tmp_path)
    monkeypatch.setattr(resume, "FORMAT", 0)
    with pytest.raises(ValueError, match=r"newer mstrain \(format 1, this one reads 0\). Update mstrain"):
        train(again(made, directory, steps=8))
    assert saved_steps(directory) == [2, 4, 6]


def test_a_folder_that_cannot_be_written_is_refused(made, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="Cannot write into run_dir=.*Type another run_dir="):
        _make_folder(again(made, tmp_path / "file"), tmp_path / "file")


class Disk:
    """A disk without room during the saves of `steps`: the kernel refuses files above a few kilobytes."""

    def __init__(self, monkeypatch, steps):
        soft, self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        original, original_wait = Checkpoints.save, Checkpoints.wait

        def save(checkpoints, step, *rest):
            self.limit(4096 if step in steps else soft)
            original(checkpoints, step, *rest)

        def wait(checkpoints):
            try:
                original_wait(checkpoints)
            finally:
                self.limit(soft)

        monkeypatch.setattr(Checkpoints, "save", save)
        monkeypatch.setattr(Checkpoints, "wait", wait)

    def limit(self, size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._hard))


def test_training_goes_on_when_a_save_fails(made, tmp_path, monkeypatch, capsys):
    """A writer of the failed save that is late puts a file back after its folder was removed."""
    Disk(monkeypatch, {2})
    give_up = Checkpoints.give_up_save

    def late(checkpoints):
        give_up(checkpoints)
        (checkpoints.directory / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)

    monkeypatch.setattr(Checkpoints, "give_up_save", late)
    run = again(made, tmp_path / "run")
    assert train(run) == 0
    assert "saving step 2 failed (1 in a row)" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == [4, 6]
    assert not [*(tmp_path / "run" / "checkpoints").glob("*tmp*")]
    assert [row["loss"] for row in lines(tmp_path / "run")] == [row["loss"] for row in lines(folder_of(made))]


def test_too_many_failures_in_a_row_end_the_run(made, tmp_path, monkeypatch, capsys):
    Disk(monkeypatch, {4, 6, 8})
    limits = dataclasses.replace(made.config.checkpoint, max_failures=2)
    run = again(made, tmp_path / "run", checkpoint=limits)
    with pytest.raises(Stopped, match="1") as stopped:
        train(run)
    assert stopped.value.code == 1 and "2 saves in a row failed" in printed(run)
    assert saved_steps(tmp_path / "run") == [2]
    assert not manifest.problems(tmp_path / "run" / "checkpoints" / "2")


def test_parameters_of_another_run_begin_a_new_one(made, tmp_path):
    run = again(made, tmp_path / "run", init_from=made.config.run_dir, steps=2)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 3)
    saving = folder_of(made) / "checkpoints" / "8.orbax-checkpoint-tmp"
    saving.mkdir()
    state, done = resume.begin(run, checkpoints)
    assert saving.is_dir(), "the other run may be saving at this moment"
    saving.rmdir()
    theirs = Checkpoints(folder_of(made) / "checkpoints", 3)
    whole = theirs.restore(6, made.module, made.optimizer)
    assert done == 0 and int(state["step"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state["params"], whole["params"])
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state["optimizer"]))
    checkpoints.close()
    theirs.close()


@settings(max_examples=800, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.builds(lambda value: json.dumps(value).encode(), st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["files", "../x", "/etc/passwd", "a"]), inner
    ),
    max_leaves=8,
))))  # fmt: skip
def test_any_manifest_is_judged_and_nothing_outside_is_read(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "manifest"
    folder.mkdir(exist_ok=True)
    (folder / manifest.NAME).write_bytes(content)
    found = manifest.problems(folder)
    assert all(isinstance(line, str) for line in found)
    assert not any("passwd" in line for line in found)
    assert isinstance(manifest.size(epath.Path(folder)), int)


def test_an_address_is_refused_before_a_folder_of_its_name_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in ("run_dir", "init_from", "data.cache_dir", "checkpoint.local_dir"):
        for address in ("gs://bucket/run", "s3://bucket/run", "S3:/bucket"):
            with pytest.raises(ValueError, match=f"{key}={address} is an address.*type {key}=/mnt/"):
                load_config([f"{key}={address}"])
    assert not [*tmp_path.iterdir()]


class Damaged:
    """What `Corpus.verification` does when tokens are not those of their digest."""

    def wait(self):
        raise ValueError("the tokens of train.bin are not those that were written")


@pytest.mark.parametrize("resumes", [False, True])
def test_no_checkpoint_is_saved_or_continued_before_the_tokens_are_verified(made, tmp_path, resumes):
    if resumes:
        copy(made, tmp_path)
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    run = again(made, tmp_path / "run")
    run = dataclasses.replace(run, corpus=dataclasses.replace(run.corpus, verification=Damaged()))
    run.__dict__["compiled_step"] = made.compiled_step
    before = saved_steps(tmp_path / "run") if resumes else [0]  # step 0 is made of no tokens
    with pytest.raises(ValueError, match="train.bin"):
        train(run)
    assert saved_steps(tmp_path / "run") == before
    assert not resumes or "Resume" not in printed(run)
