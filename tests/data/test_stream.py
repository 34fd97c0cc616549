"""A corpus in windows: a pure function of (seed, k), each token once an epoch, little on disk."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mstrain.data import DataConfig, prepare
from mstrain.data.tokenizers import train_bpe

SEQ, BATCH = 7, 4


@pytest.fixture
def config(tmp_path):
    """Eight files of one letter each, and validation data."""
    for letter in "abcdefgh":
        text = json.dumps({"text": letter * (400 + 40 * ord(letter) % 7)}) + "\n"
        (tmp_path / f"{letter}.jsonl").write_text(text)
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "v.jsonl").write_text(json.dumps({"text": "v" * 300}) + "\n")
    return DataConfig(
        "jsonl", f"{tmp_path}/*.jsonl", validation=f"{tmp_path}/validation", window=2, cache_dir=f"{tmp_path}/cache"
    )


def finish(batches):
    """Waits until the next window is made."""
    for window in batches._next.values():
        window.result()


def letters(tokens):
    return {chr(token) for token in np.unique(tokens) if token < 255}


def kept(config):
    return [path for path in Path(config.cache_dir).iterdir() if (path / "train.bin").exists()]


def test_windows_come_one_after_the_other_and_are_removed(config):
    batches = prepare(config, seed=1).batches("train", SEQ, BATCH, seed=1)
    seen, most = [], 0
    for step in range(150):
        seen.append(batches.batch(step).tokens)
        finish(batches)
        most = max(most, len(kept(config)))
    assert most <= 4  # the one before, this one, the next one, and the first one that announces the corpus
    rows = sum(batches._rows[:4])
    epoch = np.concatenate(seen)[:rows]
    assert letters(epoch) == set("abcdefgh") and len(letters(epoch[: batches._rows[0]])) == 2
    assert not np.array_equal(epoch[:8], np.concatenate(seen)[rows : rows + 8])


def test_a_batch_does_not_depend_on_what_was_read_or_remembered(config):
    first = prepare(config, seed=1).batches("train", SEQ, BATCH, seed=1)
    wanted = {step: first.batch(step).tokens for step in range(0, 130, 9)}
    finish(first)
    shutil.rmtree(config.cache_dir)
    for step in (117, 9, 63):
        again = prepare(config, seed=1).batches("train", SEQ, BATCH, seed=1)
        np.testing.assert_array_equal(again.batch(step).tokens, wanted[step])
        assert step != 117 or len(kept(config)) <= 4  # later ones find what the first has left
        np.testing.assert_array_equal(again.batch(step, np.array([3, 1])).tokens, wanted[step][[3, 1]])
        finish(again)
    other = prepare(config, seed=2).batches("train", SEQ, BATCH, seed=2)
    assert not np.array_equal(other.batch(0).tokens, wanted[0])
    finish(other)


@pytest.mark.parametrize(
    "options, same", [({"field": "title"}, False), ({"eos": "none"}, False), ({"max_skipped": 1}, True)]
)
def test_row_counts_are_remembered_of_the_same_tokens_only(config, tmp_path, options, same):
    for path in tmp_path.glob("**/*.jsonl"):
        text = json.loads(path.read_text())["text"]
        path.write_text(json.dumps({"text": text, "title": text[: len(text) // 3]}) + "\n")
    tokenizer = str(train_bpe(["abc"], 257).save(tmp_path))

    def read(**changes):
        corpus = prepare(dataclasses.replace(config, **changes), tokenizer)
        batches = corpus.batches("train", SEQ, BATCH)
        tokens = [batches.batch(step).tokens for step in range(80)]
        finish(batches)
        return corpus.digest, np.concatenate(tokens)

    before, _ = read()
    digest, found = read(**options)
    assert (digest == before) == same
    _, fresh = read(**options, cache_dir=str(tmp_path / "fresh"))
    np.testing.assert_array_equal(found, fresh)


def test_what_a_window_cannot_do_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="add data.validation=PATH"):
        prepare(dataclasses.replace(config, validation=None))
    with pytest.raises(ValueError, match="tokenizer=bpe is trained on a whole corpus"):
        prepare(config, "bpe")
    with pytest.raises(ValueError, match="type data.window=1 or more"):
        dataclasses.replace(config, window=0)
