"""Commands that read a run: a copy of run_dir is enough to evaluate it and to sample from it, on another mesh."""

import re
import shutil

import pytest

from mstrain.commands import evaluate, sample, train
from mstrain.training import json_lines


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the run_dir of a tiny run, whose text is gone."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "text.txt").write_text("All work and no play makes a dull run. " * 400)
    words = [
        "model=tiny", "model.layers=1", "mesh=2x4", "steps=3", "batch=16", "seq=32", "sample.tokens=0", "data=text",
        f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "tokenizer=bpe", "vocab_size=300",
        "optimizer.warmup=1", f"run_dir={folder / 'run'}",
    ]  # fmt: skip
    assert train.main(words) == 0
    shutil.move(folder / "run", folder / "copy")
    return folder


def test_another_mesh_finds_the_loss_of_the_run(copied, capsys):
    (recorded,) = json_lines.read(copied / "copy" / "eval.jsonl")
    batches = evaluate.load_config([f"run_dir={copied / 'copy'}", "batches=8"]).batches
    assert evaluate.main([f"run_dir={copied / 'copy'}", f"batches={batches}", "mesh=4x2"]) == 0
    shown = re.search(r"loss\W+([\d.]+) nats/token", capsys.readouterr().out)
    assert float(shown[1]) == pytest.approx(recorded["validation_loss"], abs=1e-4)


def test_a_sample_needs_neither_the_text_nor_the_corpus(copied, capsys):
    hidden = [(copied / name, copied / f"{name}.hidden") for name in ("text.txt", "cache")]
    for path, place in hidden:
        path.rename(place)
    try:
        shown = []
        for mesh in ("2x4", "2x2"):
            words = [f"run_dir={copied / 'copy'}", "prompt=All work", "tokens=8", "temperature=0", f"mesh={mesh}"]
            assert sample.main(words) == 0
            shown.append(capsys.readouterr().out)
        assert "All work" in shown[0] and shown[0] == shown[1]
    finally:
        for path, place in hidden:
            place.rename(path)


@pytest.mark.parametrize("command", [evaluate, sample])
@pytest.mark.parametrize("words, message", [
    (["run_dir=/nowhere"], "no run has saved there"), ([], "run_dir= is missing"),
    (["run_dir=COPY", "model.heads=2"], "model.heads"), (["run_dir=COPY", "foo=1"], "There is no key 'foo'"),
])  # fmt: skip
def test_mistakes_name_the_fix(command, words, message, copied):
    with pytest.raises(ValueError, match=re.escape(message)):
        command.main([word.replace("COPY", str(copied / "copy")) for word in words])
