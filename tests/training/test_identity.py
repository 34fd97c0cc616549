"""A resume is of the same run: every key is classified, every difference found, nothing lost or changed in silence."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mstrain.commands.recorded import run_config
from mstrain.commands.train import load_config
from mstrain.data import DataConfig
from mstrain.data.tokenizers import train_bpe
from mstrain.job.job import ALONE
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.training import json_lines, record
from mstrain.training.config import RunConfig
from mstrain.training.identity import (
    CLASSES,
    KEPT,
    LOCAL,
    OPTIMIZER,
    Record,
    class_of,
    differences,
    parse_allow,
    recorded_keys,
    refusal,
    refused,
)
from mstrain.training.previous import BY_STEP, PROGRESS_FILES, inspect_run_dir
from mstrain.training.resume import check_resolved
from mstrain.training.session import train
from tests.training.runs import lines, make

DEFAULTS = record.DEFAULTS
RUN = RunConfig(ModelConfig(), DataConfig(), ParallelConfig())
BEFORE = Record(recorded_keys(RUN) | {"optimizer.learning_rate": 0.1}, {"data": "d", "tokenizer": "bytes"})


def changed(**values) -> Record:
    """BEFORE with other values; `__` stands for a dot."""
    return Record(BEFORE.config | {key.replace("__", "."): value for key, value in values.items()}, BEFORE.digests)


def names(before, now, allowed=frozenset()) -> list[str]:
    return [difference.name for difference in refused(differences(before, now, DEFAULTS), set(allowed))]


def test_every_key_is_classified():
    """A new key must be put into CLASSES: into KEPT when it changes the function learned, the schedule or the data."""
    groups = {key.partition(".")[0] for key in DEFAULTS if "." in key}
    for key in DEFAULTS:
        assert key in CLASSES or (key.partition(".")[0] in CLASSES and "." in key), key
    assert not [name for name in CLASSES if name not in DEFAULTS and name not in groups]


@pytest.mark.parametrize("key", [key for key in DEFAULTS if class_of(key) != LOCAL])
def test_a_changed_key_is_found_and_refused_by_its_class(key):
    now = Record(BEFORE.config | {key: "another"}, BEFORE.digests)
    assert [difference.name for difference in differences(BEFORE, now, DEFAULTS)] == [key]
    assert names(BEFORE, now) == ([key] if class_of(key) == KEPT else [])
    refused_always = [key] if key == OPTIMIZER else []
    assert names(BEFORE, now, {key}) == names(BEFORE, now, {key.partition(".")[0]}) == refused_always


def test_changed_contents_are_refused_whatever_their_path():
    now = Record(BEFORE.config | {"data.path": "elsewhere", "tokenizer": "copy.json"}, {"data": "e", "tokenizer": "t"})
    assert names(BEFORE, now) == ["data", "tokenizer"]
    assert names(BEFORE, dataclasses.replace(now, digests=BEFORE.digests)) == []
    message = refusal("run.json", differences(BEFORE, now, DEFAULTS), {"data"}, "Type A")
    assert "data.path: null recorded, elsewhere now" in message and 'allow="tokenizer"' in message


def test_another_optimizer_is_refused_without_a_key_to_allow_it():
    found = differences(BEFORE, changed(optimizer__name="muon", steps=9), DEFAULTS)
    message = refusal("run.json", found, {"optimizer", "steps"}, "Type A")
    assert "optimizer.name: adamw recorded, muon now" in message
    assert "type init_from=" in message and "allow=" not in message


def of_model(**sizes) -> Record:
    return Record(recorded_keys(dataclasses.replace(RUN, model=ModelConfig(**sizes))), BEFORE.digests)


def test_what_follows_from_another_key_is_not_a_change_of_its_own():
    assert names(of_model(heads=8), of_model(heads=8, num_kv_heads=8, head_dim=32, attention_scale=32**-0.5)) == []
    assert names(of_model(heads=8), of_model(heads=4)) == ["model.heads"]
    assert names(of_model(heads=8), of_model(heads=4, head_dim=16)) == ["model.head_dim", "model.heads"]


def test_steps_are_the_schedule_unless_the_rate_is_constant():
    constant = dict(optimizer__final_fraction=1.0, optimizer__warmup=5)
    assert names(changed(steps=10), changed(steps=20)) == ["steps"]
    assert names(changed(**constant, steps=10), changed(**constant, steps=20)) == []
    assert names(changed(**constant, steps=4), changed(**constant, steps=20)) == ["steps"]


def test_init_from_may_be_left_out_and_not_replaced():
    assert names(changed(init_from="a"), changed(init_from=None)) == []
    assert names(changed(init_from="a"), changed(init_from="b")) == ["init_from"]


def test_records_of_other_versions_are_compared_by_defaults():
    older = Record({key: value for key, value in BEFORE.config.items() if key != "model.window"}, BEFORE.digests)
    assert names(older, BEFORE) == [] and names(older, changed(model__window=8)) == ["model.window"]
    newer = Record(BEFORE.config | {"model.experts": 8}, BEFORE.digests)
    assert names(newer, BEFORE) == ["model.experts"]


def test_allow_names_what_it_can_permit():
    keys = parse_allow("model.heads data lost_steps:12 no_record", DEFAULTS)
    assert keys == {"model.heads", "data", "lost_steps:12", "no_record"} and parse_allow(None, DEFAULTS) == set()
    for text, words in {
        "mesh": "may change without it", "optimizer.learning": "Did you mean optimizer.learning_rate",
        "lost_steps": "unknown key of a run", "run_dir": "may change without it",
        "optimizer.name": "has no effect. A checkpoint holds the moments of its optimizer.name, .* type init_from=",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            parse_allow(text, DEFAULTS)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
near_records = st.fixed_dictionaries(
    {"format": st.just(1) | values, "digests": st.just(BEFORE.digests) | values},
    optional={"config": st.dictionaries(st.sampled_from(sorted(BEFORE.config)) | st.text(max_size=5), values)},
)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | (near_records | values).map(lambda value: json.dumps(value).encode()))
def test_any_run_json_is_compared_or_refused_with_the_fix(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "record"
    folder.mkdir(exist_ok=True)
    (folder / record.RUN).write_bytes(content)
    try:
        found = inspect_run_dir(folder, ALONE).record
    except ValueError as error:
        assert "run_dir=" in str(error)
    else:
        assert refusal("run.json", differences(found, BEFORE, DEFAULTS), set(), "Type") or found.config


@pytest.mark.parametrize("sign", PROGRESS_FILES)
def test_progress_without_a_checkpoint_is_a_loss_that_must_be_named(sign, tmp_path):
    if sign == "damaged":
        (tmp_path / sign / "7").mkdir(parents=True)
    else:
        text = json.dumps(record.to_json(BEFORE)) if sign == record.RUN else '{"step": 7}\n'
        (tmp_path / sign).write_text(text)
    previous, steps = inspect_run_dir(tmp_path, ALONE), 7 if sign in (*BY_STEP, "damaged") else 0
    assert previous.progress_files == [sign] and previous.steps == steps
    with pytest.raises(ValueError, match=f"{sign}.*allow=lost_steps:{steps} to start"):
        previous.refuse_loss("r", {"lost_steps:6"} if steps else set())
    previous.refuse_loss("r", {f"lost_steps:{steps + 1}"})


def test_files_that_no_run_wrote_show_no_progress(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "eval.jsonl").write_text("not JSON")
    (tmp_path / "damaged").symlink_to("/")
    assert inspect_run_dir(tmp_path, ALONE).progress_files == []


def test_lines_that_are_missing_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 5, 6, 8)))
    assert json_lines.missing(path, 9, 1) == "3-4, 7, 9" and json_lines.missing(path, 2, 1) == ""
    assert json_lines.missing(path, 8, 2) == "3-4" and json_lines.missing(tmp_path / "none", 3, 1) == "1-3"


def refusals(directory, *arguments, monkeypatch) -> str:
    """What a start with `arguments` is refused with; fails when it reads the corpus first."""

    def too_late(*_):
        raise AssertionError("the corpus was read")

    with monkeypatch.context() as patch, pytest.raises(ValueError) as error:
        patch.setattr("mstrain.training.prepare.prepare_corpus", too_late)
        make(directory, *arguments)
    return str(error.value)


def test_another_function_or_schedule_is_refused_before_the_corpus_is_read(finished, monkeypatch):
    directory = Path(finished.config.run_dir)
    words = ["model.heads=4", "model.activation=relu", "optimizer.learning_rate=0.5", "dtype=bf16", "seed=1", "batch=8"]
    for word in words:
        message = refusals(directory, "steps=6", word, monkeypatch=monkeypatch)
        assert message.count(word.partition("=")[0]) == 2, message
    assert "steps: 6 recorded, 20 now" in refusals(directory, "steps=20", monkeypatch=monkeypatch)
    message = refusals(directory, "mesh=4x2", "seq=8", monkeypatch=monkeypatch)
    assert "mesh: row2-col4 recorded, row4-col2 now" in message


def test_run_dir_alone_is_the_run_that_is_there(finished):
    directory = f"run_dir={finished.config.run_dir}"
    same = load_config([directory])
    before = record.record_of(finished)
    assert names(before, Record(recorded_keys(same), before.digests)) == []
    longer = load_config([directory, "steps=20", "allow=steps", "mesh=4x2"])
    assert (longer.steps, longer.model, longer.mesh) == (20, same.model, "4x2")
    assert load_config([directory, "steps=20"]).model.name == "small"  # a command of its own, which is then refused


def recorded(directory: Path, before: Record) -> str:
    (directory / record.RUN).write_text(json.dumps(record.to_json(before)))
    return f"run_dir={directory}"


def test_run_dir_alone_continues_sums_in_bf16(tmp_path):
    alone = recorded(tmp_path, changed(optimizer__gradients="bf16", accumulate=2))
    assert load_config([alone, "accumulate=1"]).optimizer.gradients == "bf16"
    assert run_config(str(tmp_path), ["batch=1"]).optimizer.gradients == "bf16"


def test_run_dir_alone_keeps_checkpoints_and_guard_as_the_run_did(tmp_path):
    alone = recorded(tmp_path, changed(checkpoint__keep_every=1000, guard__rollback=True, mesh="1x2", eval__batches=2))
    config = load_config([alone, "steps=720", "allow=steps"])
    assert (config.checkpoint.keep_every, config.guard.rollback, config.eval.batches) == (1000, True, 2)
    assert config.mesh == "auto" and load_config([alone, "checkpoint.keep_every=null"]).checkpoint.keep_every is None


def test_init_from_is_checked_before_the_corpus_is_read(finished, tmp_path, monkeypatch):
    def source(folder, *words):
        return refusals(tmp_path / "new", f"init_from={folder}", *words, monkeypatch=monkeypatch)

    assert "has no checkpoints. Type the run_dir" in source(tmp_path / "nowhere")
    assert "model.heads: 8 recorded, 4 now" in source(finished.config.run_dir, "model.heads=4")


def test_another_corpus_is_refused_before_anything_is_compiled(finished, monkeypatch):
    def too_late(*_):
        raise AssertionError("the step was compiled")

    monkeypatch.setattr("mstrain.program.program.Program.compile", too_late)
    with pytest.raises(ValueError, match="data: [0-9a-f]{32} recorded") as error:
        make(Path(finished.config.run_dir), "mesh=2x4", "steps=6", "vocab_size=59", "model.vocab_size=61")
    assert 'allow="data"' in str(error.value)


def test_a_copied_run_dir_has_its_tokenizer_and_its_history(tmp_path, monkeypatch):
    text = "def f(x):\n    return x + 1\n\n" * 400
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.py").write_text(f"# {number}\n{text}")
    train_bpe([text], 270).save(tmp_path)
    words = [
        "data=text", f"data.path={tmp_path / 'text'}", f"tokenizer={tmp_path / 'tokenizer.json'}", "mesh=1x1",
        "parallel=gspmd", "model.layers=1", "model.width=16", "model.mlp_dim=16", "model.heads=2", "batch=2",
    ]  # fmt: skip
    monkeypatch.setattr("tests.training.runs.ARGUMENTS", ["model=tiny", "seq=16", "eval.batches=1", "sample.tokens=0"])
    words += ["steps=2", "checkpoint.every=1"]
    assert train(make(tmp_path / "run", *words)) == 0
    (tmp_path / "tokenizer.json").unlink()
    copied = shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(copied / "checkpoints" / "2")
    run = make(copied, "log_every=2", *words)
    shown = io.StringIO()
    run = dataclasses.replace(run, console=Console(file=shown, width=300))
    check_resolved(run, inspect_run_dir(copied, ALONE))
    assert "log_every: 1 recorded, 2 now" in shown.getvalue()
    assert train(run) == 0 and len(lines(copied)) == 2
    attempts = lines(copied, "history.jsonl")
    assert [attempt["after_step"] for attempt in attempts] == [0, 1]
    assert attempts[1]["changed"].keys() == {"log_every", "data.cache_dir"}
    assert attempts[0]["versions"].keys() >= {"jax", "flax", "optax", "python"} and attempts[0]["command"]
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer="):
        make(copied, *words)
