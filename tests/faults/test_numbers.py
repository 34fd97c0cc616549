"""NaN, infinity and spikes in training; bits that flip on one device."""

import dataclasses
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from mstrain.data import DataConfig, prepare
from mstrain.job.job import ALONE
from mstrain.program import step as step_module
from mstrain.program.step import init_state
from mstrain.training.batch_order import BatchOrder
from mstrain.training.guard import FILE, Guard, GuardConfig, RollBack
from mstrain.training.replicas import ReplicaCheck, differing_devices
from mstrain.training.rollback import FILE as ROLLBACKS
from mstrain.training.session import train
from mstrain.training.stopped import Stopped
from tests.faults.test_hostile import values as hostile
from tests.faults.test_storage import again
from tests.training.runs import lines, losses, make, saved_steps

WORDS = (
    "mesh=2x2x1",
    "model.layers=1",
    "parallel=collective",
    "steps=8",
    "checkpoint.every=4",
    "eval.every=100",
)
OFTEN = tuple(word.replace("checkpoint.every=4", "checkpoint.every=2") for word in WORDS)
POISON = {
    "nan in the loss": (np.nan, 1.0),
    "nan in the gradients": (1.0, np.nan),
    "inf in the gradients": (1.0, np.inf),
}


def poison(monkeypatch, feed, batches, loss_factor, gradient_factor):
    """Multiplies loss and gradients of the given batches (numbers from 0) inside the compiled step."""
    markers = jnp.stack([jnp.asarray(feed(batch).tokens)[0, 0] for batch in batches])
    original = step_module.gradients

    def gradients(module, params, batch, *rest):
        loss, grads = original(module, params, batch, *rest)
        bad = jnp.any(jnp.all(batch.tokens[0, 0] == markers, axis=-1))
        grads = jax.tree.map(lambda x: x * jnp.where(bad, gradient_factor, 1.0), grads)
        return loss * jnp.where(bad, loss_factor, 1.0), grads

    monkeypatch.setattr(step_module, "gradients", gradients)


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    return make(tmp_path_factory.mktemp("numbers") / "feed", *WORDS).feed


@pytest.mark.parametrize("kind", POISON)
def test_a_bad_step_changes_nothing(kind, feed, tmp_path, monkeypatch):
    poison(monkeypatch, feed, [3], *POISON[kind])
    run = make(tmp_path / "run", *WORDS)
    state = init_state(run.module, run.optimizer, 0)
    for number in range(3):
        state, metrics = run.step(state, run.feed(number))
    before = jax.device_get(state)
    after, metrics = run.step(state, run.feed(3))
    after = jax.device_get(after)
    assert metrics["skipped"] == 1 and after["step"] == 4
    for path, value in jax.tree_util.tree_leaves_with_path(after):
        old = dict(jax.tree_util.tree_leaves_with_path(before))[path]
        np.testing.assert_array_equal(value, old if value.dtype == np.float32 else old + 1)


def test_a_bad_step_is_noted_with_its_batch(feed, tmp_path, monkeypatch):
    poison(monkeypatch, feed, [3, 5], np.nan, np.nan)
    run = make(tmp_path / "run", *WORDS)
    assert train(run) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    assert train(run) == 0  # again from step 4 on: every bad step stands once, of both lives
    rows = lines(tmp_path / "run")
    assert [row["step"] for row in rows if "skipped" in row] == [4, 6]
    assert all(np.isfinite(row["loss"]) for row in rows if "skipped" not in row)
    noted = lines(tmp_path / "run", FILE)
    assert [(note["step"], note["batch"], note["seed"]) for note in noted] == [(4, 3, 0), (6, 5, 0)]
    assert all("skipped" in note["reason"] for note in noted)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["bad_steps"] == 2


def test_bad_steps_in_a_row_stop_the_run_and_keep_the_good_checkpoint(feed, tmp_path, monkeypatch):
    poison(monkeypatch, feed, [4, 5, 6], np.nan, np.nan)
    run = make(tmp_path / "run", *WORDS, "guard.max_bad_steps=3")
    with pytest.raises(Stopped) as stopped:
        train(run)
    assert (
        stopped.value.code == 1 and "3 bad steps in a row" in stopped.value.reason and "batch 6" in stopped.value.reason
    )
    assert saved_steps(tmp_path / "run") == [0, 4] and len(lines(tmp_path / "run", FILE)) == 3
    typed = "guard.rollback=true", "optimizer.learning_rate=0.001", "allow=optimizer.learning_rate"
    assert all(word.partition("=")[0] in stopped.value.reason for word in typed)
    assert train(make(tmp_path / "run", *WORDS, "guard.max_bad_steps=3", *typed)) == 0  # what the message says


def guard(batches, last=1000, history=None, **config):
    console = Console(file=io.StringIO(), record=True, width=300)
    return Guard(GuardConfig(**config), last, BatchOrder(batches), None, console, history), console


def test_spikes_count_only_when_asked_for(feed):
    losses = [3.0, 3.1, 2.9] * 5 + [9.0, 3.0, 9.0, 9.0]
    for spike, expected in ((None, 0), (6.0, 3)):
        watch, console = guard(feed.batches, spike=spike, max_bad_steps=3)
        for step, loss in enumerate(losses, 1):
            watch(step, {"loss": loss, "grad_norm": 1.0, "skipped": 0.0})
        shown = console.export_text()
        assert shown.count("is a spike over") == expected
        assert ("Step 16: the loss 9.0000 is a spike" in shown) == bool(expected)


@pytest.mark.parametrize("sources", [{"mixture": "{0}/a.txt:2 {0}/b.txt:1"}, {"path": "{0}", "window": 1}])
def test_a_bad_step_names_the_files_of_a_mixture_and_of_a_window(tmp_path, sources):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    found = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in sources.items()}
    held_out = {"validation": str(tmp_path / "c.txt")} if "window" in sources else {}
    config = DataConfig("text", cache_dir=str(tmp_path / "cache"), **found, **held_out)
    watch, console = guard(prepare(config, seed=3).batches("train", 8, 4, seed=3))
    watch(1, {"loss": np.nan, "grad_norm": 1.0, "skipped": 1.0})
    shown = " ".join(console.export_text().split())
    assert f"batch 0 of seed 3 in {watch.order.batches.origin}." in shown
    assert str(tmp_path / "cache") in watch.order.batches.origin


def verdict(batches, bad, restarts=(), **config):
    """The step after which the guard ends a run with these `bad` steps, and why; restarted after some steps."""
    watch = guard(batches, last=len(bad), **config)[0]
    for step, is_bad in enumerate(bad, 1):
        try:
            watch(step, {"loss": 3.0 + step % 3, "grad_norm": 1.0, "skipped": float(is_bad)})
        except (Stopped, RollBack) as end:
            return step, getattr(end, "reason", None) or end.spike
        if step in restarts:
            saved = json.loads(json.dumps(watch.history()))
            watch = guard(batches, last=len(bad), history=saved, **config)[0]
    return None


@pytest.mark.parametrize(
    "bad, ends",
    [
        ("xxxxxx.xxxxx", 12),  # 11 of 12, in a run shorter than the window
        ("x.", None),  # half of a short run is not more than half
        ("x", 1),
        ("xx." * 100, 16),  # 11 of 16
        ("x." * 100, None),
        ("." * 50 + "x" * 10 + "." * 50, 60),  # in a row
        ("." * 50 + "x" * 9 + "." * 50, None),
    ],
)
def test_a_share_of_bad_steps_ends_a_run(bad, ends, feed):
    found = verdict(feed.batches, [step == "x" for step in bad])
    assert (found and found[0]) == ends


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sets(st.integers(1, 60)), st.booleans())
def test_restarts_change_no_verdict(feed, bad, restarts, rollback):
    config = {"window": 10, "max_bad_steps": 4, "spike": 1.2, "rollback": rollback}
    assert verdict(feed.batches, bad, restarts, **config) == verdict(feed.batches, bad, **config)


@settings(max_examples=200, deadline=None)
@given(hostile)
def test_any_memory_of_a_checkpoint_is_taken(feed, history):
    keys = ("bad_steps", "in_a_row", "recent", "losses")
    for given_history in (history, dict.fromkeys(keys, history)):
        watch = guard(feed.batches, history=given_history, spike=6.0)[0]
        watch(1, {"loss": 3.0, "grad_norm": 1.0, "skipped": 0.0})
        assert json.loads(json.dumps(watch.history())).keys() == {*keys}


def test_a_rollback_resumes_before_the_bad_steps_without_their_batches(feed, tmp_path, monkeypatch):
    """Restarted or not, and without its file, the run goes on as if the bad batches had never been in the corpus."""
    poison(monkeypatch, feed, [4, 5], np.nan, np.nan)
    run = make(tmp_path / "run", *OFTEN, "guard.rollback=true", "guard.max_bad_steps=2")
    assert train(run) == 0
    directory = tmp_path / "run"
    (rollback,) = lines(directory, ROLLBACKS)
    assert (rollback["first"], rollback["last"], rollback["restored"]) == (5, 6, 4) and rollback["skipped"] == [4, 5]
    expected = losses(directory)
    assert len(expected) == 8 and np.isfinite(expected).all()
    for name, kept in (("restarted", ("6", ROLLBACKS)), ("without the file", ("6",)), ("from the start", (ROLLBACKS,))):
        copy = shutil.copytree(directory, tmp_path / name)
        for path in [copy / ROLLBACKS, *(copy / "checkpoints").iterdir()]:
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if "6" not in kept:
            for path in copy.glob("*.json*"):  # a run that has not started
                if path.name != ROLLBACKS:
                    path.unlink()
        assert train(again(run, copy)) == 0
        assert losses(copy) == expected, name
    hosts = dataclasses.replace(run.config.checkpoint, local_dir=str(tmp_path / "local"), local_every=1)
    assert train(again(run, tmp_path / "of the hosts", checkpoint=hosts)) == 0
    assert losses(tmp_path / "of the hosts") == expected


def test_a_rollback_needs_a_checkpoint_and_has_a_limit(feed, tmp_path, monkeypatch):
    poison(monkeypatch, feed, [1, 2, 4, 5], np.nan, np.nan)
    run = make(tmp_path / "run", *OFTEN, "guard.rollback=true", "guard.max_bad_steps=2")
    early = again(run, tmp_path / "early", checkpoint=dataclasses.replace(run.config.checkpoint, every=1, keep=1))
    with pytest.raises(Stopped) as stopped:
        train(early)
    assert "no checkpoint from before step 2" in stopped.value.reason and stopped.value.code == 1
    late = again(run, tmp_path / "late", checkpoint=dataclasses.replace(run.config.checkpoint, every=1),
                 guard=dataclasses.replace(run.config.guard, max_rollbacks=1))  # fmt: skip
    with pytest.raises(Stopped) as stopped:
        train(late)
    assert "2 bad steps in a row, after 1 rollbacks" in stopped.value.reason
    assert lines(tmp_path / "late", ROLLBACKS)[0]["skipped"] == [1, 2]


def test_the_mesh_axes_of_a_value_decide_what_its_copies_are(feed):
    mesh = jax.make_mesh((2, 2, 1), ("data", "row", "col"), devices=jax.devices()[:4])

    def odd(spec, *checksums):
        indices = NamedSharding(mesh, spec).devices_indices_map((8,))
        found = {device.id: np.array([value]) for device, value in zip(mesh.devices.flat, checksums, strict=True)}
        return [device.id for device in differing_devices(indices, found, 0)]

    assert odd(P(), 1, 1, 1, 2) == [3] and odd(P(("data", "row")), 1, 2, 3, 4) == []
    assert odd(P("row"), 1, 2, 1, 2) == [] and odd(P("row"), 1, 2, 1, 3) == [1, 3]  # no majority of two
    whole = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P()))
    parts = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("row")))
    count = jax.device_put(np.int32(3), NamedSharding(mesh, P()))
    ReplicaCheck(ALONE)(1, {"whole": whole, "parts": parts, "count": count})  # raises nothing


@pytest.mark.parametrize("device", [0, 3])
@pytest.mark.parametrize("bit", [0, 30])
@pytest.mark.parametrize("spec", [P(), P("row"), P(("data", "row"))], ids=str)
def test_one_flipped_bit_names_its_device(spec, device, bit, feed):
    mesh = jax.make_mesh((4, 1, 1), ("data", "row", "col"), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, spec)
    value = np.linspace(-1, 1, 16, dtype=np.float32)
    copies = []
    for place, index in sharding.addressable_devices_indices_map(value.shape).items():
        part = value[index].copy()
        if place.id == device:
            part.view(np.uint32)[1] ^= np.uint32(1 << bit)
        copies.append(jax.device_put(part, place))
    broken = jax.make_array_from_single_device_arrays(value.shape, sharding, copies)
    check = ReplicaCheck(ALONE)
    if spec == P(("data", "row")):  # sharded over all devices: there is no copy to compare with
        return check(5, {"weight": broken})
    with pytest.raises(Stopped) as stopped:
        check(5, {"weight": broken})
    assert (
        f"['weight'] on device {device} of process 0" in stopped.value.reason and "after step 5" in stopped.value.reason
    )
    assert stopped.value.reason.count(" on device") == 1


def test_a_run_checks_its_replicas_before_it_saves_them(tmp_path, monkeypatch):
    called = []

    def check(self, step, state):
        called.append(step)
        if step == 8:
            raise Stopped("copies differ")

    monkeypatch.setattr(ReplicaCheck, "__call__", check)
    with pytest.raises(Stopped):
        train(make(tmp_path / "run", *WORDS, "check_replicas.every=3"))
    assert called == [3, 6, 8] and saved_steps(tmp_path / "run") == [0, 4]
