"""Commands that read a run: a copy of run_dir is enough to evaluate it and to sample from it, on another mesh."""

import json
import math
import re
import shutil

import jax
import numpy as np
import pytest

from mstrain.commands import evaluate, sample, train
from mstrain.commands.prompts import read_prompts
from mstrain.commands.recorded import run_config
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


def test_every_token_and_every_document_is_evaluated_once(copied, capsys):
    out, documents = copied / "loss.json", copied / "documents.jsonl"
    words = [f"run_dir={copied / 'copy'}", "mesh=1x1", f"out={out}", f"documents={documents}", "split=all", "batch=32"]
    assert evaluate.main(words) == 0
    found, (train, validation) = json.loads(out.read_text()), json_lines.read(documents)
    size = (copied / "text.txt").stat().st_size
    assert [train["split"], validation["split"]] == ["train", "validation"]
    assert train["name"] == validation["name"] and str(train["name"]).endswith("text.txt")
    assert found["tokens"] == train["tokens"] + validation["tokens"]
    assert found["nats"] == pytest.approx(train["nats"] + validation["nats"], rel=1e-6)
    text_bytes = sum(one["nats"] / math.log(2) / one["bits_per_byte"] for one in (train, validation))
    assert text_bytes == pytest.approx(size) and found["loss"] == pytest.approx(found["nats"] / found["tokens"])
    assert "lowest loss" in capsys.readouterr().out


def test_batches_count_the_tokens_that_their_masks_select(copied, tmp_path):
    words, found = [f"run_dir={copied / 'copy'}", "mesh=1x1", "pack=none", "seq=13", "allow=pack seq"], []
    for options in (["batch=16"], ["batches=1", "batch=32", "accumulate=2"]):
        out = tmp_path / f"{len(found)}.json"
        assert evaluate.main([*words, *options, f"out={out}"]) == 0
        found.append(json.loads(out.read_text()))
    tokens = found[0]["tokens"]
    assert math.ceil(tokens / 13) == 16 and tokens % 13  # 16 rows, the last one is not full; a batch has each twice
    assert found[1]["tokens"] == 2 * tokens and found[1]["nats"] == pytest.approx(2 * found[0]["nats"], rel=1e-5)


def test_the_result_of_a_mixture_is_that_of_its_sources_by_weight(copied, tmp_path):
    weights = {"a": 0.75, "b": 0.25}
    for name, text in (("a", "No play makes a run. "), ("b", "0123456789 é ")):
        (tmp_path / name).mkdir()
        for number in range(4):
            (tmp_path / name / f"{number}.txt").write_text(text * 40)
    mixture = " ".join(f"{tmp_path / name}:{weight}" for name, weight in weights.items())
    words = [f"run_dir={copied / 'copy'}", "mesh=1x1", "data=text", "data.path=null", f"data.mixture={mixture}"]
    assert evaluate.main([*words, f"data.cache_dir={tmp_path / 'cache'}", f"out={tmp_path / 'out.json'}"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tokens"] == sum(source["tokens"] for source in found["sources"])
    bits = [source["loss"] / math.log(2) for source in found["sources"]]
    sizes = [bit / source["bits_per_byte"] for bit, source in zip(bits, found["sources"], strict=True)]
    bits, size = (np.dot(list(weights.values()), values) for values in (bits, sizes))
    assert found["loss"] == pytest.approx(bits * math.log(2)) and found["bits_per_byte"] == pytest.approx(bits / size)
    assert found["nats"] == pytest.approx(found["loss"] * found["tokens"])


@pytest.mark.parametrize("part", ["batches=8", "split=all"])
def test_weights_that_are_not_finite_are_refused(copied, monkeypatch, part):
    read = evaluate.EvaluateConfig.parameters

    def damaged(*arguments):
        name, params = read(*arguments)
        return name, jax.tree.map(lambda x: x * math.nan, params)

    monkeypatch.setattr(evaluate.EvaluateConfig, "parameters", damaged)
    words = [f"run_dir={copied / 'copy'}", "mesh=1x1", "batch=32", part, f"out={copied / 'nan.json'}"]
    with pytest.raises(ValueError, match="is not finite, so its weights are damaged. Type another checkpoint."):
        evaluate.main(words)
    assert not (copied / "nan.json").exists()


def test_documents_without_a_token_to_predict_are_refused(copied, monkeypatch):
    monkeypatch.setattr(
        "mstrain.training.measure.measure", lambda module, params, rows, _: np.zeros((2, rows.num_rows))
    )
    words = [f"run_dir={copied / 'copy'}", "mesh=1x1", "batch=32", f"documents={copied / 'none.jsonl'}"]
    with pytest.raises(ValueError, match="has no token to predict. Type data.path="):
        evaluate.main(words)
    assert not (copied / "none.jsonl").exists()


def test_a_sample_needs_neither_the_text_nor_the_corpus(copied, capsys):
    hidden = [(copied / name, copied / f"{name}.hidden") for name in ("text.txt", "cache")]
    for path, place in hidden:
        path.rename(place)
    try:
        words = [f"run_dir={copied / 'copy'}", "tokens=8", "temperature=0", "step=3"]
        assert sample.main([*words, "prompt=All work", "mesh=1x1"]) == 0
        alone = capsys.readouterr()
        (copied / "prompts.txt").write_text("All work and no play\nAll work\n")
        more = [f"prompts={copied / 'prompts.txt'}", f"out={copied / 'samples.jsonl'}", "mesh=2x4"]
        assert sample.main([*words, *more]) == 0
        both, lines = capsys.readouterr().out, json_lines.read(copied / "samples.jsonl")
        assert alone.out.startswith("All work") and re.search(r"prefill .* tokens/s; decode 7 tokens, ", alone.err)
        assert both.splitlines()[-1] == f"[2] {alone.out.strip()}"
        assert lines[1] == {"prompt": "All work", "text": lines[1]["text"], "tokens": 8, "end": "length"}
        assert "All work" + lines[1]["text"] == alone.out.rstrip("\n")
        assert sample.main([*words, "prompt=", "mesh=1x1"]) == 0
        assert not capsys.readouterr().out.startswith("def")  # sample.prompt of the run
    finally:
        for path, place in hidden:
            place.rename(path)


@pytest.mark.parametrize("words, message", [
    (["prompts=/nowhere"], "Cannot read prompts=/nowhere"), (["prompt=a", "prompts=b"], "both given"),
    (["stop=[1"], "is not a list of texts"), (["prompt=a: b", "prompts=b"], "both given"),
    (["top_p=2"], "top_p=2.0 is not above 0"),
    (["prompts=BAD"], "line 2 has no"),
])  # fmt: skip
def test_wrong_prompts_name_the_fix(words, message, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}\n')
    with pytest.raises(ValueError, match=re.escape(message)):
        sample.main(["run_dir=/nowhere", *[word.replace("BAD", str(tmp_path / "bad.jsonl")) for word in words]])


@pytest.mark.parametrize("command", [evaluate, sample])
@pytest.mark.parametrize("words, message", [
    (["run_dir=/nowhere"], "no run has saved there"), ([], "run_dir= is missing"),
    (["run_dir=COPY", "model.heads=2"], "model.heads"), (["run_dir=COPY", "foo=1"], "Unknown key 'foo'"),
    (["run_dirr=COPY"], "Did you mean run_dir?"), (["foo"], "Cannot read 'foo'"),
    (["run_dir=COPY", "step=2"], "has no checkpoint of step=2. Type one of: 3"), (["init=/tmp", "step=2"], "step="),
])  # fmt: skip
def test_mistakes_name_the_fix(command, words, message, copied):
    with pytest.raises(ValueError, match=re.escape(message)):
        command.main([word.replace("COPY", str(copied / "copy")) for word in words])


def test_another_path_keeps_the_recorded_source_and_another_source_does_not_keep_the_path(copied):
    found = run_config(str(copied / "copy"), ["data.path=other.txt"])
    assert (found.data.source, found.data.path, found.allow) == ("text", "other.txt", "data")
    assert found.data.cache_dir == run_config(str(copied / "copy"), []).data.cache_dir
    with pytest.raises(ValueError, match=re.escape("data.path=FILE_OR_FOLDER")):
        run_config(str(copied / "copy"), ["data=jsonl"])


def test_other_data_are_read_with_the_tokenizer_that_the_run_has_trained(copied):
    run_dir = copied / "copy"
    for keys in (["data=text", "data.path=other.txt"], ["data.path=other.txt"]):
        found = run_config(str(run_dir), keys)
        assert (found.tokenizer, found.vocab_size) == (str(run_dir / "tokenizer.json"), None)
        found = run_config(str(run_dir), [*keys, "tokenizer=other.json"])
        assert (found.tokenizer, found.vocab_size) == ("other.json", None)
    for keys in ([], ["data.cache_dir=other"]):
        assert (found := run_config(str(run_dir), keys)).tokenizer == "bpe" and found.vocab_size == 300


def test_the_last_answer_of_a_conversation_is_not_part_of_its_prompt(tmp_path):
    question = {"role": "user", "content": "x"}
    lines = [json.dumps({"messages": [question, *rest]}) for rest in ([], [{"role": "assistant", "content": "y"}])]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    assert read_prompts(str(tmp_path / "chats.jsonl"), chat=True) == [[question]] * 2


def test_only_a_line_end_ends_a_prompt(tmp_path):
    text = "one\u2028two\x85three\x0cfour"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", "utf-8-sig")
    (tmp_path / "a.txt").write_text(f"{text}\n\nfive\n", "utf-8-sig")
    assert read_prompts(str(tmp_path / "a.jsonl"), chat=True) == [text]
    assert read_prompts(str(tmp_path / "a.txt"), chat=False) == [text, "five"]


def test_a_damaged_checkpoint_is_named_before_an_older_one_is_read(copied, tmp_path, capsys):
    shutil.copytree(copied / "copy", tmp_path / "run")
    checkpoints, words = tmp_path / "run" / "checkpoints", [f"run_dir={tmp_path / 'run'}", "mesh=1x1"]
    shutil.copytree(checkpoints / "3", checkpoints / "5")
    (checkpoints / "5" / "state" / "_METADATA").write_text("{}")
    assert evaluate.main([*words, "batches=8", "log_every=2"]) == 0
    shown = capsys.readouterr()
    assert "checkpoint 5 of run_dir=" in shown.err and "_METADATA" in shown.err and "3 is read instead" in shown.err
    assert "run, step 3" in shown.out and "Resume" not in shown.out  # `log_every` differs, and nothing is resumed
    with pytest.raises(ValueError, match="checkpoint 5 .* is damaged: .*Remove step="):
        sample.main([*words, "step=5"])
    shutil.rmtree(checkpoints / "3")
    with pytest.raises(ValueError, match="checkpoint 5 .* is damaged: (?s:.*)no checkpoint that can be read"):
        sample.main(words)
